"""Model runner: inputs of scheduled sequences, one call of the model, sampled tokens, outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import torch
from torch import Tensor

from ..lora.adapters import Adapters
from .interfaces import Speculation
from .output_processor import FAILURES, OutputProcessor
from .recorded.async_decode import AsyncDecode
from .recorded.decoder import RecordedDecoder
from .request_manager import RequestManager
from .sampling.prompt_logprobs import compute_prompt_logprobs, prompt_logit_rows
from .sampling.sampler import SampledTokens, Sampler
from .scheduling.scheduler import Scheduler
from .sequence import ScheduledSequence
from .source_encoder import SourceEncoder
from .stats import EngineStats
from .step_inputs import StepInputs
from .stop_conditions import error_fields


class StepRunner(Protocol):
    """A step of a language model as a backend opens it."""

    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Run the step on the inputs of `llm.step.paged_step`: {"logits": float32 [rows, vocab]}; writes the cache."""


class ModelRunner:
    """Runner of a step over the KV cache; a failed call is retried for each sequence alone.

    With a `decoder` a decode step is launched, and `collect` reads its tokens.
    """

    def __init__(
        self,
        step: StepRunner,
        cache: Tensor,
        batch: StepInputs,
        sampler: Sampler,
        scheduler: Scheduler,
        request_manager: RequestManager,
        statistics: EngineStats,
        *,
        eos_ids: Collection[int],
        context: int,
        clock: Callable[[], float],
        adapters: Adapters | None,
        speculation: Speculation | None,
        sources: SourceEncoder | None = None,
        decoder: RecordedDecoder | None = None,
    ) -> None:
        self._step, self._cache, self._step_inputs, self._sampler = step, cache, batch, sampler
        self._scheduler, self._request_manager, self._statistics = scheduler, request_manager, statistics
        self._clock = clock
        self._outputs = OutputProcessor(
            scheduler, request_manager, statistics, page=batch.page, eos_ids=eos_ids, context=context
        )
        self._adapters, self._speculation = adapters, speculation
        self._states, self._sources = scheduler.state_rows, sources
        self._async = None
        if decoder is not None:
            self._async = AsyncDecode(
                *(decoder, batch, scheduler, statistics),
                append=self._outputs.append,
                failures=FAILURES,
                limits=scheduler.limits,
                context=context,
                clock=clock,
                speculation=speculation,
            )

    def __call__(self, work: list[ScheduledSequence]) -> None:
        decode = all(
            s.num_output_tokens
            and size == 1
            and s.num_computed_tokens + 1 == len(s.tokens)
            and s.source_ready
            for s, size in work
        )
        if decode and self._async is not None and self._async.launch(work):
            return
        (self._decode if decode and all(s.fast_decode for s, _ in work) else self._run)(work)

    @property
    def is_pending(self) -> bool:
        """True when a step was launched whose tokens are not read."""
        return self._async is not None and self._async.pending is not None

    def collect(self) -> None:
        """Apply the tokens of the pending step, after the launch of the next one where that can be."""
        if self._async is not None:
            self._async.collect()

    def _decode(self, work: list[ScheduledSequence]) -> None:
        """Run a pure decode step, one token of each sequence: the fast path of `_run`."""
        started = self._clock()
        sequences = [sequence for sequence, _ in work]
        try:
            inputs = self._step_inputs.decode(sequences)
            self._add_persistent_inputs(inputs, work)
            built = self._clock()
            with torch.inference_mode():
                logits = self._step.run(inputs)["logits"]
                ran = self._clock()
                tokens = self._sampler.draw(logits, sequences)
        except FAILURES as error:
            self._failed(work, error)
            return
        sampled = self._clock()
        for sequence, token in zip(sequences, tokens, strict=True):
            if not sequence.finished:  # with another completion of its request, just now
                self._outputs.append(sequence, token)
        times = (built - started, ran - built, sampled - ran, self._clock() - sampled)
        self._statistics.count(0, len(work), times)
        if self._speculation is not None:
            self._speculation.measured(len(work), len(work), _step_seconds(logits, built, ran, sampled))

    def _run(self, work: list[ScheduledSequence]) -> None:
        """Run any step; when the model fails, run each sequence once more alone, so that only a bad one fails."""
        started = self._clock()
        for sequence, _ in work:
            if sequence.state.started_at is None:
                sequence.state.started_at = started
        rows: list[int] = []
        encoded = 0
        try:
            if self._sources is not None:
                with torch.inference_mode():
                    encoded = self._sources.encode(work)
            scored = prompt_logit_rows(work, rows)
            sample_rows, slices = self._outputs.sample_rows(work, rows)
            inputs = self._step_inputs.build(work, rows)
            self._add_persistent_inputs(inputs, work)
            built = self._clock()
            with torch.inference_mode():
                logits = self._step.run(inputs)["logits"]
                ran = self._clock()
                scores = compute_prompt_logprobs(scored, logits)
                sampled_tokens = self._sampler(logits, sample_rows) if sample_rows else SampledTokens([], {})
        except FAILURES as error:
            self._failed(work, error)
            return
        sampled = self._clock()
        for state, values in scores:
            state.add_prompt_logprobs(values)
        prefill = encoded + sum(item.num_tokens for item in work if not item.is_decode)
        decoded = self._outputs.apply(work, sample_rows, slices, sampled_tokens)
        times = (built - started, ran - built, sampled - ran, self._clock() - sampled)
        self._statistics.count(prefill, decoded, times)
        if self._speculation is not None and not prefill:
            took = _step_seconds(logits, built, ran, sampled)
            self._speculation.measured(sum(item.num_tokens for item in work), len(work), took)

    def _add_persistent_inputs(self, inputs: dict[str, Tensor], work: list[ScheduledSequence]) -> None:
        """Add the inputs that outlive a step: the caches, and the adapters."""
        inputs["kv_cache"] = self._cache
        if self._adapters is not None:
            slots = [item.sequence.state.adapter for item in work]
            inputs |= self._adapters.inputs(slots, [item.num_tokens for item in work])
        if self._states is not None:
            inputs |= self._states.inputs(work)
        if self._sources is not None:
            inputs |= self._sources.inputs(work)

    def _failed(self, work: list[ScheduledSequence], error: Exception) -> None:
        if self._states is not None:
            self._states.drop_written(sequence for sequence, _ in work)
        if len(work) > 1:
            for item in work:
                self._run([item])
            return
        self._statistics.failed += 1
        self._request_manager.close_all(work[0].sequence, "error", *error_fields(error))


def _step_seconds(logits: Tensor, built: float, ran: float, sampled: float) -> float:
    """Return the seconds of a step.

    On other devices than the CPU the call returns before its work is done: the copy of the tokens to the host ends it.
    """
    return (ran if logits.device.type == "cpu" else sampled) - built
