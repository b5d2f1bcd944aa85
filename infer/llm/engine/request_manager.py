"""Request manager: requests from their start through sampled tokens, drafts and forks to their end."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from ...errors import InputError
from ..lora.adapters import Adapters
from ..step.step_shape import SourceShape
from ..text.detokenize import DetokenizerFactory
from ..text.grammar.grammar import GrammarCache
from ..text.stop_strings import StopStrings, TextStream
from .drafts import Speculation
from .requests import FinishReason, Output, Request, TokenLogprob
from .sampling.sampler import SampledTokens, SampleRow
from .scheduling.admission import decoder_start
from .scheduling.scheduler import Scheduler
from .sequence import RequestState, ScheduledSequence, Sequence
from .stats import EngineStats
from .stop_conditions import FAILURES, append_token, append_tokens, error_fields, final_output

LogprobsByIndex = dict[int, TokenLogprob]


class RequestManager:
    """States of the unfinished requests by id, and `outputs` since they were last taken.

    A sequence that ends leaves the scheduler at once. An error of one sequence fails its request only.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        statistics: EngineStats,
        *,
        pieces: DetokenizerFactory | None,
        grammars: GrammarCache | None,
        speculation: Speculation | None,
        adapters: Adapters | None,
        eos_ids: Collection[int],
        context: int,
        source: SourceShape | None = None,
    ) -> None:
        self.states: dict[str, RequestState] = {}
        self.outputs: list[Output] = []
        self._scheduler, self._statistics = scheduler, statistics
        self._detokenizers, self._grammars, self._speculation = pieces, grammars, speculation
        self._adapters, self._source = adapters, source
        self._eos_ids, self._context = eos_ids, context
        self._page, self._without_states = scheduler.block_manager.page_size, scheduler.state_rows is None
        self._number = 0

    def begin(self, request: Request, now: float, aging: float) -> None:
        """Queue the first sequence of a request; the others are forked from it once the prompt is computed."""
        rows, start = 0, tuple[int, ...]()
        if self._source is not None:
            rows, start = self._source.rows(len(request.prompt)), decoder_start(self._source, request)
        words = self._word_tokens(request.sampling.bad_words)
        state = RequestState(
            request, self._number, now, aging, start=start, source_rows=rows, bad_words=words
        )
        state.sequences.append(self.open(state, 0))
        if self._adapters is not None and request.adapter is not None:
            state.use_adapter(*self._adapters.take(request.adapter))
        self._number += 1
        self.states[request.id] = state
        self._scheduler.add(state.sequences[0])

    def open(self, state: RequestState, index: int) -> Sequence:
        """Create a completion with its own text, grammar and drafts; it is not yet scheduled."""
        sequence, request = Sequence(state, index), state.request
        if self._detokenizers is not None:
            detokenizer = self._detokenizers.start(
                state.prompt, skip_special=state.sampling.skip_special_tokens
            )
            stops = StopStrings(state.sampling.stop, include=state.sampling.include_stop)
            sequence.text = TextStream(detokenizer, stops)
        if request.grammar is not None and self._grammars is not None:
            sequence.grammar = self._grammars.open(request.grammar)
        if self._speculation is not None:
            sequence.speculator = self._speculation.open(request)
        return sequence

    def fork(self, family: list[Sequence]) -> None:
        """Start the other completions of a request from its first one, over the same pages."""
        parent, state = family[0], family[0].state
        for child in family[1:]:
            state.sequences.append(child)
            self._scheduler.fork(parent, child)
        state.forked = True

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
            self.blame(sequence, error)
            return
        self.outputs.append(output)
        if output.finish is not None:
            self.finish(sequence)

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
                        SampleRow(self.open(state, index), len(rows) - 1)
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
                self.blame(item.sequence, error)
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
                self.close_all(sequence, "length")
            return 0
        family = [row.sequence for row in sample_rows]
        self.fork(family)
        for i, member in enumerate(family):
            own = {0: scores[i]} if i in scores else {}
            self.close(member, append_tokens(member, [sampled_tokens[i]], own, self._eos_ids, self._context))
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
        self.close(sequence, output)
        return kept

    def close(self, sequence: Sequence, output: Output) -> None:
        """Add an output, and end the sequence with its last one."""
        self.outputs.append(output)
        if output.finish is not None:
            self.finish(sequence)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence, and its request with the last one."""
        self._end(sequence)
        if sequence.state.unfinished == 0:
            self._forget(sequence.state)
            self._statistics.finished += 1

    def close_all(
        self, sequence: Sequence, finish: FinishReason, by: str | None = None, fault: str = ""
    ) -> None:
        """End a sequence without a token, with the completions that were to be forked from it."""
        state, output = sequence.state, final_output(sequence, finish, by, fault)
        if not state.forked:
            state.unfinished = 1
            self.outputs += [msgspec.structs.replace(output, index=i) for i in range(1, state.sampling.n)]
        self.close(sequence, output)

    def drop(self, state: RequestState, finish: FinishReason, by: str | None = None, fault: str = "") -> None:
        """End all unfinished completions of a request without a token; their pages are free at once."""
        id = state.request.id
        for index in range(state.sampling.n):
            if index >= len(state.sequences):
                self.outputs.append(Output(id=id, index=index, finish=finish, stopped_by=by, fault=fault))
            elif not state.sequences[index].finished:
                self._end(state.sequences[index])
                self.outputs.append(Output(id=id, index=index, finish=finish, stopped_by=by, fault=fault))
        self._forget(state)

    def blame(self, sequence: Sequence, error: Exception) -> None:
        """End a request with an error after processing one of its sequences raised; other requests continue."""
        self._statistics.failed += 1
        if sequence.state.request.id in self.states:
            self.drop(sequence.state, "error", *error_fields(error))

    def live(self) -> list[Sequence]:
        """List the sequences that are not finished."""
        return [s for state in self.states.values() for s in state.sequences if not s.finished]

    def _word_tokens(self, words: tuple[str, ...]) -> list[tuple[int, ...]]:
        """Return the tokens of words, at the begin of a text and behind a space."""
        if self._detokenizers is None:
            return []
        behind = [f" {word.lstrip()}" for word in words if word.strip()]
        encode = self._detokenizers.tokenizer.encode
        try:
            rows = [tuple(encode(text, add_special_tokens=False).ids) for text in (*words, *behind)]
        except Exception as error:  # of no class of its own
            raise InputError(f"a word has no tokens: {str(error)[:200]}", where="bad_words") from error
        return [*dict.fromkeys(filter(None, rows))]

    def _end(self, sequence: Sequence) -> None:
        sequence.finished = True
        sequence.state.unfinished -= 1
        self._scheduler.remove(sequence)

    def _forget(self, state: RequestState) -> None:
        """Remove a request, breaking its reference cycles so that it is freed without the garbage collector."""
        del self.states[state.request.id]
        state.sequences.clear()
        if self._adapters is not None and state.request.adapter is not None:
            self._adapters.release(state.request.adapter)


def _slice_logprobs(scores: LogprobsByIndex, rows_of: slice) -> LogprobsByIndex:
    """Select the logprobs of one sequence, indexed from its first row."""
    return (
        {i - rows_of.start: scores[i] for i in range(rows_of.start, rows_of.stop) if i in scores}
        if scores
        else {}
    )
