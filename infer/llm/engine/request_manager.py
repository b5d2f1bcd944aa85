"""Requests in flight: how one begins, forks, fails and ends, and what is to be told of it."""

from __future__ import annotations

import msgspec

from ..lora.adapters import Adapters
from ..text.detokenize import Pieces
from ..text.stop_strings import StopStrings, TextStream
from .interfaces import Grammars, Speculation
from .requests import FinishReason, Output, Request
from .scheduler import Scheduler
from .sequence import Job, Sequence
from .stats import EngineStats
from .stop_conditions import ended, told


class InFlight:
    """`outputs` since they were last taken; a sequence that ends leaves the scheduler at once."""

    def __init__(
        self,
        scheduler: Scheduler,
        statistics: EngineStats,
        *,
        pieces: Pieces | None,
        grammars: Grammars | None,
        speculation: Speculation | None,
        adapters: Adapters | None,
    ) -> None:
        self.jobs: dict[str, Job] = {}
        self.outputs: list[Output] = []
        self._scheduler, self._statistics = scheduler, statistics
        self._pieces, self._grammars, self._speculation = pieces, grammars, speculation
        self._adapters = adapters
        self._number = 0

    def begin(self, request: Request, now: float, aging: float) -> None:
        """Queue its first sequence; the others are forked from it once the prompt is read."""
        job = Job(request, self._number, now, aging)
        job.sequences.append(self.open(job, 0))
        if self._adapters is not None and request.adapter is not None:
            job.use_adapter(*self._adapters.take(request.adapter))
        self._number += 1
        self.jobs[request.id] = job
        self._scheduler.add(job.sequences[0])

    def open(self, job: Job, index: int) -> Sequence:
        """A completion of the job with text, grammar and drafts of its own; not yet scheduled."""
        sequence, request = Sequence(job, index), job.request
        if self._pieces is not None:
            detokenizer = self._pieces.start(request.prompt, skip_special=job.sampling.skip_special_tokens)
            stops = StopStrings(job.sampling.stop, include=job.sampling.include_stop)
            sequence.text = TextStream(detokenizer, stops)
        if request.grammar is not None and self._grammars is not None:
            sequence.grammar = self._grammars.open(request.grammar)
        if self._speculation is not None:
            sequence.speculator = self._speculation.open(request)
        return sequence

    def fork(self, family: list[Sequence]) -> None:
        """The first goes on as all of them; of a job that wants one completion that is all."""
        parent, job = family[0], family[0].job
        for child in family[1:]:
            job.sequences.append(child)
            self._scheduler.fork(parent, child)
        job.forked = True

    def close(self, sequence: Sequence, output: Output) -> None:
        """Hand on an output, and end the sequence with its last one."""
        self.outputs.append(output)
        if output.finish is not None:
            self.finish(sequence)

    def finish(self, sequence: Sequence) -> None:
        self._end(sequence)
        if sequence.job.unfinished == 0:
            self._forget(sequence.job)
            self._statistics.finished += 1

    def close_all(
        self, sequence: Sequence, finish: FinishReason, by: str | None = None, fault: str = ""
    ) -> None:
        """Without a token; with those completions that were to be forked from it."""
        job, output = sequence.job, ended(sequence, finish, by, fault)
        if not job.forked:
            job.unfinished = 1
            self.outputs += [msgspec.structs.replace(output, index=i) for i in range(1, job.sampling.n)]
        self.close(sequence, output)

    def drop(self, job: Job, finish: FinishReason, by: str | None = None, fault: str = "") -> None:
        """End all its completions that are not over, without a token; their pages are free at once."""
        id = job.request.id
        for index in range(job.sampling.n):
            if index >= len(job.sequences):
                self.outputs.append(Output(id=id, index=index, finish=finish, stopped_by=by, fault=fault))
            elif not job.sequences[index].finished:
                self._end(job.sequences[index])
                self.outputs.append(Output(id=id, index=index, finish=finish, stopped_by=by, fault=fault))
        self._forget(job)

    def blame(self, sequence: Sequence, error: Exception) -> None:
        """What followed the model raised on account of this sequence: its request ends, the others go on."""
        self._statistics.failed += 1
        if sequence.job.request.id in self.jobs:
            self.drop(sequence.job, "error", *told(error))

    def live(self) -> list[Sequence]:
        return [s for job in self.jobs.values() for s in job.sequences if not s.finished]

    def _end(self, sequence: Sequence) -> None:
        sequence.finished = True
        sequence.job.unfinished -= 1
        self._scheduler.remove(sequence)

    def _forget(self, job: Job) -> None:
        """Let go of it; its sequences refer back, and would stay until a full collection."""
        del self.jobs[job.request.id]
        job.sequences.clear()
        if self._adapters is not None and job.request.adapter is not None:
            self._adapters.release(job.request.adapter)
