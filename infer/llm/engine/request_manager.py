"""Request manager: requests from their start through forks to their end, and the outputs to return."""

from __future__ import annotations

import msgspec

from ..lora.adapters import Adapters
from ..step.step_shape import SourceShape
from ..text.detokenize import DetokenizerFactory
from ..text.stop_strings import StopStrings, TextStream
from .drafts import Speculation
from .interfaces import GrammarBackend
from .requests import FinishReason, Output, Request
from .scheduling.admission import decoder_start
from .scheduling.scheduler import Scheduler
from .sequence import RequestState, Sequence
from .stats import EngineStats
from .stop_conditions import error_fields, final_output


class RequestManager:
    """States of the unfinished requests by id, and `outputs` since they were last taken.

    A sequence that ends leaves the scheduler at once.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        statistics: EngineStats,
        *,
        pieces: DetokenizerFactory | None,
        grammars: GrammarBackend | None,
        speculation: Speculation | None,
        adapters: Adapters | None,
        source: SourceShape | None = None,
    ) -> None:
        self.states: dict[str, RequestState] = {}
        self.outputs: list[Output] = []
        self._scheduler, self._statistics = scheduler, statistics
        self._detokenizers, self._grammars, self._speculation = pieces, grammars, speculation
        self._adapters, self._source = adapters, source
        self._number = 0

    def begin(self, request: Request, now: float, aging: float) -> None:
        """Queue the first sequence of a request; the others are forked from it once the prompt is computed."""
        rows, start = 0, tuple[int, ...]()
        if self._source is not None:
            rows, start = self._source.rows(len(request.prompt)), decoder_start(self._source, request)
        state = RequestState(request, self._number, now, aging, start=start, source_rows=rows)
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
