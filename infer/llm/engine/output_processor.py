"""Output processor: sampled tokens to sequences, their ends, forks and drafts."""

from __future__ import annotations

from collections.abc import Collection

from .drafts import FAILURES
from .request_manager import RequestManager
from .requests import TokenLogprob
from .sampling.sampler import SampledTokens, SampleRow
from .scheduling.scheduler import Scheduler
from .sequence import ScheduledSequence, Sequence
from .stats import EngineStats
from .stop_conditions import append_token, append_tokens

LogprobsByIndex = dict[int, TokenLogprob]


class OutputProcessor:
    """Applies the tokens of a step to its sequences. An error of one sequence fails its request only.

    `page`: tokens of a page of the KV cache.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        request_manager: RequestManager,
        statistics: EngineStats,
        *,
        page: int,
        eos_ids: Collection[int],
        context: int,
    ) -> None:
        self._scheduler, self._request_manager, self._statistics = scheduler, request_manager, statistics
        self._page, self._eos_ids, self._context = page, eos_ids, context
        self._without_states = scheduler.state_rows is None

    def append(self, sequence: Sequence, token: int, logprob: TokenLogprob | None = None) -> None:
        """Apply the token of a decode step to its sequence."""
        try:
            if self._without_states and (sequence.num_computed_tokens + 1) % self._page:
                sequence.num_computed_tokens += 1
            else:
                self._scheduler.advance(sequence, 1)
            if sequence.fast_decode:
                output = append_token(sequence, token, self._eos_ids, self._context)
            else:
                scores = {} if logprob is None else {0: logprob}
                output = append_tokens(sequence, [token], scores, self._eos_ids, self._context)
        except FAILURES as error:
            self._request_manager.blame(sequence, error)
            return
        self._request_manager.outputs.append(output)
        if output.finish is not None:
            self._request_manager.finish(sequence)

    def sample_rows(
        self, work: list[ScheduledSequence], rows: list[int]
    ) -> tuple[list[SampleRow], list[slice]]:
        """Return the tokens to sample and each sequence's slice of them; their logit rows are appended to `rows`."""
        sample_rows: list[SampleRow] = []
        slices = []
        at = 0
        for sequence, count in work:
            at += count
            state, num_drafts, start = sequence.state, len(sequence.draft_tokens), len(sample_rows)
            if (
                sequence.num_computed_tokens + count == len(sequence.tokens) + num_drafts
                and state.sampling.max_tokens
            ):
                for place in range(num_drafts + 1):
                    sample_rows.append(SampleRow(sequence, len(rows), place))
                    rows.append(at - 1 - num_drafts + place)
                if not state.forked:
                    sample_rows += [
                        SampleRow(self._request_manager.open(state, index), len(rows) - 1)
                        for index in range(1, state.sampling.n)
                    ]
            slices.append(slice(start, len(sample_rows)))
        return sample_rows, slices

    def apply(
        self,
        work: list[ScheduledSequence],
        sample_rows: list[SampleRow],
        slices: list[slice],
        sampled: SampledTokens,
    ) -> int:
        """Apply the results of a call; `slices`: rows of each sequence. Return the number of new tokens."""
        decoded = 0
        for item, rows_of in zip(work, slices, strict=True):
            if item.sequence.finished:  # with another completion of its request, just now
                continue
            scores_of = _slice_logprobs(sampled.logprobs, rows_of)
            try:
                decoded += self._advance(*item, sample_rows[rows_of], sampled.tokens[rows_of], scores_of)
            except FAILURES as error:
                self._request_manager.blame(item.sequence, error)
        return decoded

    def _advance(
        self,
        sequence: Sequence,
        size: int,
        sample_rows: list[SampleRow],
        sampled_tokens: list[int],
        scores: LogprobsByIndex,
    ) -> int:
        """Apply the results of a call to one sequence; returns the number of new tokens."""
        if sequence.draft_tokens:
            return self._advance_draft(sequence, sampled_tokens, scores)
        self._scheduler.advance(sequence, size)
        if not sample_rows:
            if sequence.num_computed_tokens == len(sequence.tokens):
                self._request_manager.close_all(sequence, "length")
            return 0
        family = [row.sequence for row in sample_rows]
        self._request_manager.fork(family)
        for i, member in enumerate(family):
            own = {0: scores[i]} if i in scores else {}
            self._request_manager.close(
                member, append_tokens(member, [sampled_tokens[i]], own, self._eos_ids, self._context)
            )
        return len(family)

    def _advance_draft(self, sequence: Sequence, sampled_tokens: list[int], scores: LogprobsByIndex) -> int:
        """Keep the draft tokens that equal the sampled ones, and the token sampled after them."""
        drafted = len(sequence.draft_tokens)
        output = append_tokens(sequence, sampled_tokens, scores, self._eos_ids, self._context)
        kept = len(output.token_ids)
        self._scheduler.advance(sequence, kept)
        self._scheduler.pages.release_unused(sequence)
        sequence.draft_tokens = []
        if sequence.speculator is not None:
            sequence.speculator.observe(drafted, max(kept - 1, 0))
        self._statistics.draft_tokens += drafted
        self._statistics.accepted_tokens += max(kept - 1, 0)
        self._request_manager.close(sequence, output)
        return kept


def _slice_logprobs(scores: LogprobsByIndex, rows_of: slice) -> LogprobsByIndex:
    """Select the logprobs of one sequence, indexed from its first row."""
    return (
        {i - rows_of.start: scores[i] for i in range(rows_of.start, rows_of.stop) if i in scores}
        if scores
        else {}
    )
