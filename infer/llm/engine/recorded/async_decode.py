"""Asynchronous decode: the next step is launched before the tokens of the last one are read.

The device takes the tokens that it sampled itself. What the host finds when it reads them one step late (an end token,
a stop string, a cancelled request) ends a sequence whose next token is then dropped; its place in the cache is free at
once, as the device works in order. A step waits for the host where the next one depends on it: other sequences run
or wait, a grammar allows other tokens, a draft was found, or there is no page.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import NamedTuple

from ..interfaces import Speculation
from ..sampling.sampler_device import UNDECIDED
from ..scheduling.engine_limits import EngineLimits
from ..scheduling.scheduler import Scheduler
from ..sequence import ScheduledSequence, Sequence
from ..stats import EngineStats
from ..step_inputs import StepInputs
from .decoder import PendingTokens, RecordedDecoder


class PendingDecode(NamedTuple):
    """Decode step that was launched, and whose tokens are not read."""

    work: list[ScheduledSequence]
    computed: list[int]  # tokens of each sequence, without that of the step
    tokens: PendingTokens
    started: float
    built: float
    launched: float


class AsyncDecode:
    """Decode steps on a `decoder`. `append(sequence, token)` applies a sampled token.

    `failures`: errors of a launch, after which the step runs in the plain way, which finds out whose they are.
    """

    def __init__(
        self,
        decoder: RecordedDecoder,
        step_inputs: StepInputs,
        scheduler: Scheduler,
        statistics: EngineStats,
        *,
        append: Callable[[Sequence, int], None],
        failures: tuple[type[Exception], ...],
        limits: EngineLimits,
        context: int,
        clock: Callable[[], float],
        speculation: Speculation | None,
    ) -> None:
        self.decoder, self._step_inputs, self._scheduler = decoder, step_inputs, scheduler
        self._statistics, self._append, self._failures = statistics, append, failures
        self._limits, self._context, self._clock, self._speculation = limits, context, clock, speculation
        self.pending: PendingDecode | None = None
        self._read_at = 0.0

    def launch(self, work: list[ScheduledSequence], ahead: int = 0) -> bool:
        """Launch a decode step, `ahead` 1 on top of the pending one; False if it can't run here."""
        started, sequences = self._clock(), [sequence for sequence, _ in work]
        try:
            inputs = self._step_inputs.decode(sequences, ahead)
            built = self._clock()
            tokens = self.decoder.launch(inputs, sequences, ahead)
        except self._failures:
            return False
        if tokens is None:
            return False
        computed = [sequence.num_computed_tokens + ahead for sequence in sequences]
        self.pending = PendingDecode(work, computed, tokens, started, built, self._clock())
        return True

    def collect(self) -> None:
        """Launch the step after the pending one, if that can be, and apply the tokens of the pending one."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        work = self._next(pending)
        if work and self.launch(work, ahead=1):
            for item in work:
                self._scheduler.fair_shares.charge(item.sequence, 1, output=True)
            self._statistics.steps += 1
        tokens = pending.tokens.read()
        read = self._clock()
        for (sequence, _), computed, token in zip(pending.work, pending.computed, tokens, strict=True):
            if sequence.finished or sequence.num_computed_tokens != computed:
                continue  # ended, or its last token is sampled anew
            if token == UNDECIDED:
                self.decoder.forget(sequence)
            else:
                self._append(sequence, token)
        self._count(pending, read)

    def _count(self, pending: PendingDecode, read: float) -> None:
        count = len(pending.work)
        waited = read - max(pending.launched, self._read_at)
        times = (
            pending.built - pending.started,
            pending.launched - pending.built,
            waited,
            self._clock() - read,
        )
        self._statistics.count(0, count, times)
        if self._speculation is not None:
            self._speculation.measured(count, count, read - max(pending.built, self._read_at))
        self._read_at = read

    def _next(self, pending: PendingDecode) -> list[ScheduledSequence]:
        """Return the decode step that follows the pending one whatever that samples; [] if the host is needed first."""
        live = [
            sequence
            for (sequence, _), computed in zip(pending.work, pending.computed, strict=True)
            if not sequence.finished and sequence.num_computed_tokens == computed
        ]
        if self._scheduler.waiting or len(live) != len(self._scheduler.running):
            return []
        live = [sequence for sequence in live if self._goes_on(sequence)]
        if any(sequence.grammar is not None or self._drafts(sequence) for sequence in live):
            return []
        return [ScheduledSequence(s, 1) for s in live] if self._has_pages(live) else []

    def _goes_on(self, sequence: Sequence) -> bool:
        """Return true unless the pending token is the last one that the sequence may have."""
        most = sequence.state.sampling.max_tokens
        return sequence.num_output_tokens + 1 < most and len(sequence.tokens) + 1 < self._context

    def _drafts(self, sequence: Sequence) -> bool:
        """Return True if drafts that begin with the pending token are found."""
        limit = min(
            self._limits.max_draft, sequence.state.sampling.max_tokens - sequence.num_output_tokens - 1
        )
        if sequence.speculator is None or limit < 2:
            return False
        try:
            return len(sequence.speculator.draft(sequence.tokens, limit)) > 1
        except self._failures:  # it goes on without drafts
            sequence.speculator = None
            return False

    def _has_pages(self, sequences: Many[Sequence]) -> bool:
        """Allocate a page where the token after the pending one needs it; False if that would preempt another."""
        pages = self._scheduler.pages
        for sequence in sequences:
            length = sequence.num_computed_tokens + 2
            if not pages.has_room(sequence, length):
                return False
            pages.grow(sequence, length)
        return True
