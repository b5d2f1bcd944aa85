"""The loop of a language model: requests in, one step of the model at a time, tokens and text out.

One thread owns an engine. `step()` = plan (scheduler) → inputs (batch) → the model → tokens (sampling) → outputs; the
last four are `calls`, and `in_flight` knows where each request is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

from ...errors import InferError, InputError
from ..lora.adapters import Adapters
from ..step.paged_step import StepShape
from ..text.detokenize import Pieces
from .admission import Admission
from .block_manager import PagePool, default_budget, new_cache, pages_for
from .interfaces import Grammars, Speculation
from .limits import EngineLimits
from .model_runner import FAILURES, Calls, StepRunner
from .request_manager import InFlight
from .requests import Output, Request
from .sampler import Sampler
from .scheduler import Scheduler
from .stats import EngineStats
from .step_inputs import Batch

if TYPE_CHECKING:
    import tokenizers


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
        self.adapters = adapters
        if adapters is None and shape.adapters is not None:
            self.adapters = Adapters(shape.adapters, device)
        self._clock, self._grammars = clock, grammars
        self._speculation = None if self.limits.batch_invariant else speculation
        self._admission = Admission(self.limits, shape, self.context, texts=tokenizer is not None)
        self._in_flight = InFlight(
            self.scheduler,
            self.statistics,
            pieces=None if tokenizer is None else Pieces(tokenizer),
            grammars=grammars,
            speculation=self._speculation,
            adapters=self.adapters,
        )
        blocks = -(-self.context // shape.page)
        self._call = Calls(
            step,
            self.cache,
            Batch(self.limits.step_tokens, self.limits.max_running, blocks, shape.page),
            Sampler(shape.vocab_size, sorted(self.eos_ids)),
            self.scheduler,
            self._in_flight,
            self.statistics,
            eos_ids=self.eos_ids,
            context=self.context,
            clock=clock,
            adapters=self.adapters,
            speculation=self._speculation,
        )

    @property
    def idle(self) -> bool:
        """Whether `step()` has nothing to do and nothing to tell."""
        return not self._in_flight.jobs and not self._in_flight.outputs

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
        if request.id in self._in_flight.jobs:
            raise InputError(f"a request {request.id!r} is already running", where="id")
        self.check(request)
        self._in_flight.begin(request, self._clock(), self.limits.aging)

    def cancel(self, request_id: str) -> None:
        """End a request; its pages are free at once, the next `step()` tells so. Unknown ids are no error."""
        job = self._in_flight.jobs.get(request_id)
        if job is not None:
            self._in_flight.drop(job, "cancelled")
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
                self._call(group)
            self.statistics.steps += 1
        outputs, self._in_flight.outputs = self._in_flight.outputs, []
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
        if {id(s) for s in self._in_flight.live()} != {id(s) for s in (*running, *waiting)}:
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
