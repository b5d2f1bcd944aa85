"""One call of the model: inputs from the sequences, tokens from the logits, and what the sequences make of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import torch
from torch import Tensor

from ...errors import InferError
from ..lora.adapters import Adapters
from .interfaces import Speculation
from .prompt_logprobs import rows_to_score, score_prompts
from .request_manager import InFlight
from .requests import TokenLogprob
from .sampler import Drawn, Pick, Sampler
from .scheduler import Scheduler, Work
from .sequence import Sequence
from .stats import EngineStats
from .step_inputs import Batch
from .stop_conditions import take, take_next, told

Scores = dict[int, TokenLogprob]
# What a step may raise because of what it was given; anything else is a bug and ends the loop.
FAILURES = (ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError, InferError)


class StepRunner(Protocol):
    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The inputs of `generate.step` → {"logits": float32 [rows, vocab]}; the cache is written in place."""


class Calls:
    """`step` over `cache`. A call that fails is made again for each of its sequences, so that a bad one fails alone."""

    def __init__(
        self,
        step: StepRunner,
        cache: Tensor,
        batch: Batch,
        sampler: Sampler,
        scheduler: Scheduler,
        in_flight: InFlight,
        statistics: EngineStats,
        *,
        eos_ids: Collection[int],
        context: int,
        clock: Callable[[], float],
        adapters: Adapters | None,
        speculation: Speculation | None,
    ) -> None:
        self._step, self._cache, self._batch, self._sampler = step, cache, batch, sampler
        self._scheduler, self._in_flight, self._statistics = scheduler, in_flight, statistics
        self._eos_ids, self._context, self._clock = eos_ids, context, clock
        self._adapters, self._speculation = adapters, speculation

    def __call__(self, work: list[Work]) -> None:
        usual = all(
            s.simple and s.outputs and size == 1 and s.computed + 1 == len(s.tokens) for s, size in work
        )
        (self._decode if usual else self._run)(work)

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
        page, advance, eos_ids = self._batch.page, self._scheduler.advance, self._eos_ids
        for sequence, token in zip(sequences, tokens, strict=True):
            if sequence.finished:  # with another completion of its request, just now
                continue
            try:
                if (sequence.computed + 1) % page:
                    sequence.computed += 1
                else:
                    advance(sequence, 1)
                output = take_next(sequence, token, eos_ids, self._context)
            except FAILURES as error:
                self._in_flight.blame(sequence, error)
                continue
            self._in_flight.outputs.append(output)
            if output.finish is not None:
                self._in_flight.finish(sequence)
        times = (built - started, ran - built, sampled - ran, self._clock() - sampled)
        self._statistics.count(0, len(work), times)
        if self._speculation is not None:
            self._speculation.measured(len(work), len(work), ran - built)

    def _run(self, work: list[Work]) -> None:
        """One call of the model; when it fails, each sequence once more alone, so that a bad one fails alone."""
        started = self._clock()
        for sequence, _ in work:
            if sequence.job.begun is None:
                sequence.job.begun = started
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
                self._in_flight.blame(item.sequence, error)
        times = (built - started, ran - built, sampled - ran, self._clock() - sampled)
        self._statistics.count(prefill, decoded, times)
        if self._speculation is not None and not prefill:
            self._speculation.measured(sum(item.size for item in work), len(work), ran - built)

    def _lend(self, inputs: dict[str, Tensor], work: list[Work]) -> None:
        """Add what outlives a step: the cache, and the adapters."""
        inputs["kv_cache"] = self._cache
        if self._adapters is not None:
            slots = [item.sequence.job.adapter for item in work]
            inputs |= self._adapters.inputs(slots, [item.size for item in work])

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
                        Pick(self._in_flight.open(job, index), len(rows) - 1)
                        for index in range(1, job.sampling.n)
                    ]
            shares.append(slice(start, len(picks)))
        return picks, shares

    def _advance(
        self, sequence: Sequence, size: int, picks: list[Pick], drawn: list[int], scores: Scores
    ) -> int:
        """Take over what a call brought to one sequence; the number of new tokens."""
        if sequence.draft:
            return self._advance_draft(sequence, drawn, scores)
        self._scheduler.advance(sequence, size)
        if not picks:
            if sequence.computed == len(sequence.tokens):
                self._in_flight.close_all(sequence, "length")
            return 0
        family = [pick.sequence for pick in picks]
        self._in_flight.fork(family)
        for i, member in enumerate(family):
            own = {0: scores[i]} if i in scores else {}
            self._in_flight.close(member, take(member, [drawn[i]], own, self._eos_ids, self._context))
        return len(family)

    def _advance_draft(self, sequence: Sequence, drawn: list[int], scores: Scores) -> int:
        """Keep drafts as long as they are what was drawn, and the token drawn after them."""
        drafted = len(sequence.draft)
        output = take(sequence, drawn, scores, self._eos_ids, self._context)
        kept = len(output.token_ids)
        self._scheduler.advance(sequence, kept)
        self._scheduler.trim(sequence)
        sequence.draft = []
        if sequence.speculator is not None:
            sequence.speculator.observe(drafted, max(kept - 1, 0))
        self._statistics.draft_tokens += drafted
        self._statistics.accepted_tokens += max(kept - 1, 0)
        self._in_flight.close(sequence, output)
        return kept

    def _failed(self, work: list[Work], error: Exception) -> None:
        if len(work) > 1:
            for item in work:
                self._run([item])
            return
        self._statistics.failed += 1
        self._in_flight.close_all(work[0].sequence, "error", *told(error))


def _cut(scores: Scores, share: slice) -> Scores:
    """Those of one sequence, counted from its first pick."""
    return (
        {i - share.start: scores[i] for i in range(share.start, share.stop) if i in scores} if scores else {}
    )
