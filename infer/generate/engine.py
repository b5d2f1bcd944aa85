"""The loop of a language model: requests in, one step of the model at a time, tokens and text out.

One thread owns an engine. `step()` = plan (scheduler) → inputs (batch) → the model → tokens (sampling) → outputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Protocol

import msgspec
import torch
from torch import Tensor

from ..errors import InferError, InputError
from .adapters import Adapters
from .admission import Admission
from .batch import Batch
from .detokenize import Pieces
from .endings import ended, take, take_next
from .hooks import Grammars, Speculation
from .limits import EngineLimits
from .pages import PagePool, default_budget, new_cache, pages_for
from .requests import FinishReason, Output, Request, TokenLogprob
from .sampling import Drawn, Pick, Sampler
from .scheduler import Scheduler, Work
from .scoring import rows_to_score, score_prompts
from .sequence import Job, Sequence
from .stats import EngineStats
from .step import StepShape
from .stops import StopStrings, TextStream

if TYPE_CHECKING:
    import tokenizers


# What a step may raise because of what it was given; anything else is a bug and ends the loop.
Scores = dict[int, TokenLogprob]
FAILURES = (ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError, InferError)


class StepRunner(Protocol):
    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The inputs of `generate.step` → {"logits": float32 [rows, vocab]}; the cache is written in place."""


class Engine:
    """Schedules sequences on `step`, whose cache has `shape` and takes `kv_bytes` (None: a share of what is free).

    `tokenizer` None: no text, and stop strings are refused. `eos_ids` end a completion. `clock` in seconds.
    """

    def __init__(
        self,
        step: StepRunner,
        shape: StepShape,
        *,
        tokenizer: tokenizers.Tokenizer | None,
        eos_ids: Many[int],
        kv_bytes: int | None = None,
        limits: EngineLimits | None = None,
        grammars: Grammars | None = None,
        speculation: Speculation | None = None,
        adapters: Adapters | None = None,
        device: str = "cpu",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits or EngineLimits()
        self.limits.check(shape.page)
        self.shape, self.eos_ids = shape, frozenset(eos_ids)
        budget = default_budget(shape, device) if kv_bytes is None else kv_bytes
        self.cache = new_cache(shape, pages_for(budget, shape), device)
        self.pool = PagePool(self.cache, shape.page, caching=self.limits.prefix_cache)
        self.context = min(shape.max_positions, self.pool.total * shape.page)
        self.scheduler = Scheduler(self.pool, self.limits)
        self.statistics = EngineStats(pages_total=self.pool.total, page=shape.page)
        self._step, self._clock = step, clock
        self._pieces = None if tokenizer is None else Pieces(tokenizer)
        self._grammars, self._speculation = grammars, speculation
        self.adapters = adapters
        if adapters is None and shape.adapters is not None:
            self.adapters = Adapters(shape.adapters, device)
        self._sampler = Sampler(shape.vocab_size, sorted(self.eos_ids))
        blocks = -(-self.context // shape.page)
        self._batch = Batch(self.limits.step_tokens, self.limits.max_running, blocks, shape.page)
        self._admission = Admission(self.limits, shape, self.context, texts=tokenizer is not None)
        self._jobs: dict[str, Job] = {}
        self._number = 0
        self._outputs: list[Output] = []

    @property
    def idle(self) -> bool:
        """Whether `step()` has nothing to do and nothing to tell."""
        return not self._jobs and not self._outputs

    def check(self, request: Request) -> None:
        """Raise what `submit` would raise, and change nothing; may be called from any thread."""
        self._admission.check(request, self.scheduler.waiting, self.statistics.tokens_per_second)
        if request.grammar is not None:
            if self._grammars is None:
                raise InputError("this model was opened without structured output", where="grammar")
            self._grammars.check(request.grammar)
        if request.adapter is not None:
            if self.adapters is None:
                hint = "Make its artifact with --adapters SLOTS"
                raise InputError("this model takes no adapters", where="adapter", hint=hint)
            self.adapters.check(request.adapter)

    def submit(self, request: Request) -> None:
        """Take a request; its outputs come from `step()`.

        Raises `InputError` for what can't be run (the sentence says why), `OverloadedError` when too much waits.
        """
        if request.id in self._jobs:
            raise InputError(f"a request {request.id!r} is already running", where="id")
        self.check(request)
        job = Job(request, self._number, self._clock(), self.limits.aging)
        job.sequences.append(self._open(job, 0))
        if self.adapters is not None and request.adapter is not None:
            job.use_adapter(*self.adapters.take(request.adapter))
        self._number += 1
        self._jobs[request.id] = job
        self.scheduler.add(job.sequences[0])

    def cancel(self, request_id: str) -> None:
        """End a request; its pages are free at once, the next `step()` tells so. Unknown ids are no error."""
        job = self._jobs.get(request_id)
        if job is not None:
            self._drop(job, "cancelled")
            self.statistics.cancelled += 1

    def step(self) -> list[Output]:
        """Run one step and return what it brought; [] when there is nothing to do."""
        start = self._clock()
        self._guess()
        work = self.scheduler.plan()
        if work:
            groups = [[item] for item in work] if self.limits.batch_invariant else [work]
            self.statistics.scheduling_seconds += self._clock() - start
            for group in groups:
                usual = all(
                    s.simple and s.outputs and size == 1 and s.computed + 1 == len(s.tokens)
                    for s, size in group
                )
                (self._decode if usual else self._run)(group)
            self.statistics.steps += 1
        outputs, self._outputs = self._outputs, []
        return outputs

    def stats(self) -> EngineStats:
        """A copy of the counters, with what is running, waiting and held now."""
        return self.statistics.snapshot(self.scheduler, self.pool)

    def check_integrity(self) -> None:
        """Raise `InferError` when pages, sequences and counts do not agree."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        self.pool.check_integrity([sequence.pages for sequence in running])
        if any(sequence.pages or sequence.slot >= 0 for sequence in waiting):
            raise InferError("a waiting sequence holds pages")
        live = [s for job in self._jobs.values() for s in job.sequences if not s.finished]
        if {id(s) for s in live} != {id(s) for s in (*running, *waiting)}:
            raise InferError("the scheduler and the requests in flight differ")
        slots = [sequence.slot for sequence in running]
        if (
            len(set(slots)) != len(slots)
            or len(slots) + len(self.scheduler.free_slots) != self.limits.max_running
        ):
            raise InferError("a slot is missing or taken twice")
        for sequence in running:
            if len(sequence.pages) * self.shape.page < sequence.computed:
                raise InferError("a sequence has fewer pages than tokens")

    def _open(self, job: Job, index: int) -> Sequence:
        sequence, request = Sequence(job, index), job.request
        if self._pieces is not None:
            detokenizer = self._pieces.start(request.prompt, skip_special=job.sampling.skip_special_tokens)
            stops = StopStrings(job.sampling.stop, include=job.sampling.include_stop)
            sequence.text = TextStream(detokenizer, stops)
        if request.grammar is not None and self._grammars is not None:
            sequence.grammar = self._grammars.open(request.grammar)
        if self._speculation is not None and not self.limits.batch_invariant:
            sequence.speculator = self._speculation.open(request)
        return sequence

    def _guess(self) -> None:
        """Drafts for those that decode; never beyond the last token they may have."""
        if self._speculation is None:
            return
        for sequence in self.scheduler.running:
            if sequence.speculator is None or len(sequence.tokens) - sequence.computed != 1:
                continue
            left = sequence.job.sampling.max_tokens - sequence.outputs - 1
            limit = min(left, self.context - len(sequence.tokens) - 1, self.limits.max_draft)
            if sequence.outputs and limit > 0:
                try:
                    sequence.draft = list(sequence.speculator.draft(sequence.tokens, limit))[:limit]
                except FAILURES:  # it goes on without guesses
                    sequence.speculator = None

    def _decode(self, work: list[Work]) -> None:
        """`_run` where each sequence gets its next token and nothing else is wanted: the usual step, on a short way."""
        started = self._clock()
        sequences = [sequence for sequence, _ in work]
        try:
            inputs = self._batch.decode(sequences)
            self._lend(inputs, work)
            built = self._clock()
            with torch.inference_mode():
                logits = self._step.run(inputs)["logits"]
                ran = self._clock()
                tokens = self._sampler.draw(logits, sequences)
        except FAILURES as error:
            self._failed(work, error)
            return
        sampled = self._clock()
        page, advance, eos_ids = self.shape.page, self.scheduler.advance, self.eos_ids
        for sequence, token in zip(sequences, tokens, strict=True):
            if sequence.finished:  # with another completion of its request, just now
                continue
            try:
                if (sequence.computed + 1) % page:
                    sequence.computed += 1
                else:
                    advance(sequence, 1)
                output = take_next(sequence, token, eos_ids, self.context)
            except FAILURES as error:
                self._blame(sequence, error)
                continue
            self._outputs.append(output)
            if output.finish is not None:
                self._finish(sequence)
        times = (built - started, ran - built, sampled - ran, self._clock() - sampled)
        self.statistics.count(0, len(work), times)
        if self._speculation is not None:
            self._speculation.measured(len(work), len(work), ran - built)

    def _run(self, work: list[Work]) -> None:
        """One call of the model; when it fails, each sequence once more alone, so that a bad one fails alone."""
        started = self._clock()
        rows: list[int] = []
        try:
            scored = rows_to_score(work, rows)
            picks, shares = self._picks(work, rows)
            inputs = self._batch.build(work, rows)
            self._lend(inputs, work)
            built = self._clock()
            with torch.inference_mode():
                logits = self._step.run(inputs)["logits"]
                ran = self._clock()
                scores = score_prompts(scored, logits)
                drawn = self._sampler(logits, picks) if picks else Drawn([], {})
        except FAILURES as error:
            self._failed(work, error)
            return
        sampled = self._clock()
        for job, values in scores:
            job.add_scores(values)
        prefill = sum(item.size for item in work if not item.decodes)
        decoded = 0
        for item, share in zip(work, shares, strict=True):
            if item.sequence.finished:  # with another completion of its request, just now
                continue
            scores_of = _cut(drawn.logprobs, share)
            try:
                decoded += self._advance(*item, picks[share], drawn.tokens[share], scores_of)
            except FAILURES as error:
                self._blame(item.sequence, error)
        times = (built - started, ran - built, sampled - ran, self._clock() - sampled)
        self.statistics.count(prefill, decoded, times)
        if self._speculation is not None and not prefill:
            self._speculation.measured(sum(item.size for item in work), len(work), ran - built)

    def _lend(self, inputs: dict[str, Tensor], work: list[Work]) -> None:
        """Add what outlives a step: the cache, and the adapters."""
        inputs["kv_cache"] = self.cache
        if self.adapters is not None:
            slots = [item.sequence.job.adapter for item in work]
            inputs |= self.adapters.inputs(slots, [item.size for item in work])

    def _picks(self, work: list[Work], rows: list[int]) -> tuple[list[Pick], list[slice]]:
        """The tokens to choose, their rows added to `rows`, and which of them belong to each piece of work."""
        picks: list[Pick] = []
        shares = []
        at = 0
        for sequence, count in work:
            at += count
            job, ahead, start = sequence.job, len(sequence.draft), len(picks)
            if sequence.computed + count == len(sequence.tokens) + ahead and job.sampling.max_tokens:
                for place in range(ahead + 1):
                    picks.append(Pick(sequence, len(rows), place))
                    rows.append(at - 1 - ahead + place)
                if not job.forked:
                    picks += [
                        Pick(self._open(job, index), len(rows) - 1) for index in range(1, job.sampling.n)
                    ]
            shares.append(slice(start, len(picks)))
        return picks, shares

    def _advance(
        self, sequence: Sequence, size: int, picks: list[Pick], drawn: list[int], scores: Scores
    ) -> int:
        """Take over what a call brought to one sequence; the number of new tokens."""
        job = sequence.job
        if sequence.draft:
            return self._advance_draft(sequence, drawn, scores)
        self.scheduler.advance(sequence, size)
        if not picks:
            if sequence.computed == len(sequence.tokens):
                self._end_all(sequence, "length")
            return 0
        family = [pick.sequence for pick in picks]
        for child in family[1:]:
            job.sequences.append(child)
            self.scheduler.fork(sequence, child)
        job.forked = True
        for i, member in enumerate(family):
            own = {0: scores[i]} if i in scores else {}
            self._close(member, take(member, [drawn[i]], own, self.eos_ids, self.context))
        return len(family)

    def _advance_draft(self, sequence: Sequence, drawn: list[int], scores: Scores) -> int:
        """Keep drafts as long as they are what was drawn, and the token drawn after them."""
        drafted = len(sequence.draft)
        output = take(sequence, drawn, scores, self.eos_ids, self.context)
        kept = len(output.token_ids)
        self.scheduler.advance(sequence, kept)
        self.scheduler.trim(sequence)
        sequence.draft = []
        if sequence.speculator is not None:
            sequence.speculator.observe(drafted, max(kept - 1, 0))
        self.statistics.draft_tokens += drafted
        self.statistics.accepted_tokens += max(kept - 1, 0)
        self._close(sequence, output)
        return kept

    def _close(self, sequence: Sequence, output: Output) -> None:
        """Hand on an output, and end the sequence with its last one."""
        self._outputs.append(output)
        if output.finish is not None:
            self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        self._end(sequence)
        if sequence.job.unfinished == 0:
            self._forget(sequence.job)
            self.statistics.finished += 1

    def _forget(self, job: Job) -> None:
        del self._jobs[job.request.id]
        if self.adapters is not None and job.request.adapter is not None:
            self.adapters.release(job.request.adapter)

    def _end(self, sequence: Sequence) -> None:
        sequence.finished = True
        sequence.job.unfinished -= 1
        self.scheduler.remove(sequence)

    def _drop(self, job: Job, finish: FinishReason, by: str | None = None) -> None:
        """End all completions of a request that are not over, without a token."""
        id = job.request.id
        for index in range(job.sampling.n):
            if index >= len(job.sequences):
                self._outputs.append(Output(id=id, index=index, finish=finish, stopped_by=by))
            elif not job.sequences[index].finished:
                self._end(job.sequences[index])
                self._outputs.append(Output(id=id, index=index, finish=finish, stopped_by=by))
        self._forget(job)

    def _blame(self, sequence: Sequence, error: Exception) -> None:
        """What followed the model raised on account of this sequence: its request ends, the others go on."""
        self.statistics.failed += 1
        if sequence.job.request.id in self._jobs:
            self._drop(sequence.job, "error", f"{type(error).__name__}: {error}")

    def _failed(self, work: list[Work], error: Exception) -> None:
        if len(work) > 1:
            for item in work:
                self._run([item])
            return
        self.statistics.failed += 1
        self._end_all(work[0].sequence, "error", f"{type(error).__name__}: {error}")

    def _end_all(self, sequence: Sequence, finish: FinishReason, by: str | None = None) -> None:
        """Without a token; with those completions that were to be forked from it."""
        job, output = sequence.job, ended(sequence, finish, by)
        if not job.forked:
            job.unfinished = 1
            self._outputs += [msgspec.structs.replace(output, index=i) for i in range(1, job.sampling.n)]
        self._close(sequence, output)


def _cut(scores: Scores, share: slice) -> Scores:
    """Those of one sequence, counted from its first pick."""
    return (
        {i - share.start: scores[i] for i in range(share.start, share.stop) if i in scores} if scores else {}
    )
