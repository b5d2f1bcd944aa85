"""Schedule of the decode step after one that is under way, whose tokens are not known yet."""

from __future__ import annotations

from collections.abc import Sequence as Many

from ..sequence import ScheduledSequence, Sequence
from .scheduler import Scheduler


def schedule_ahead(
    scheduler: Scheduler, work: Many[ScheduledSequence], computed: Many[int], context: int
) -> list[ScheduledSequence]:
    """Return the decode step that follows `work` whatever that samples; [] if the host is needed first.

    It is where other sequences run or wait, a grammar allows other tokens, a draft is found, or there is no page.
    `computed`: tokens of each sequence without that of `work`.
    """
    live = [
        sequence
        for (sequence, _), before in zip(work, computed, strict=True)
        if not sequence.finished and sequence.num_computed_tokens == before
    ]
    if scheduler.waiting or len(live) != len(scheduler.running):
        return []
    live = [sequence for sequence in live if _goes_on(sequence, context)]
    if any(sequence.grammar is not None or _drafts(sequence, scheduler) for sequence in live):
        return []
    return [ScheduledSequence(s, 1) for s in live] if _has_pages(live, scheduler) else []


def _goes_on(sequence: Sequence, context: int) -> bool:
    """Return true unless the token that is sampled now is the last one that the sequence may have."""
    most = sequence.state.sampling.max_tokens
    return sequence.num_output_tokens + 1 < most and len(sequence.tokens) + 1 < context


def _drafts(sequence: Sequence, scheduler: Scheduler) -> bool:
    """Return True if drafts are found beyond the token that is sampled now."""
    left = sequence.state.sampling.max_tokens - sequence.num_output_tokens - 1
    limit = min(scheduler.limits.max_draft, left)
    return limit > 1 and len(sequence.draft(limit)) > 1


def _has_pages(sequences: Many[Sequence], scheduler: Scheduler) -> bool:
    """Allocate a page where the token after the next needs it; False if that would preempt another sequence."""
    for sequence in sequences:
        length = sequence.num_computed_tokens + 2
        if not scheduler.pages.has_room(sequence, length):
            return False
        scheduler.pages.grow(sequence, length)
    return True
