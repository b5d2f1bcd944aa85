"""Model runner: one loop that launches a step and reads its tokens, one step later where a device samples them.

The device takes the tokens that it sampled itself, so that the next decode step is launched before those of the last
one are read. What the host finds when it reads them late (an end token, a stop string, a cancelled request) ends a
sequence whose next token is then dropped; its place in the cache is free at once, as the device works in order.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import NamedTuple

import torch
from torch import Tensor

from ..lora.adapters import Adapters
from .prompt_lookup import PromptLookup
from .recorded.decoder import PendingTokens, RecordedDecoder
from .request_manager import RequestManager
from .sampling.prompt_logprobs import PromptRows, compute_prompt_logprobs, prompt_logit_rows
from .sampling.sampler import SampledTokens, Sampler, SampleRow
from .sampling.sampler_device import UNDECIDED
from .scheduling.ahead import schedule_ahead
from .scheduling.scheduler import Scheduler
from .sequence import ScheduledSequence
from .source_encoder import SourceEncoder
from .stats import EngineStats
from .step_inputs import StepInputs
from .step_runner import StepRunner
from .stop_conditions import FAILURES, error_fields


class LaunchedStep(NamedTuple):
    """A step whose tokens are not applied. `computed`: tokens of each sequence without those of the step.

    `slices`: rows of `sample_rows` of each sequence; None for a step of one next token each. `encoded`: rows of
    sources. The times are those of its start, of its inputs and of its launch, which on a CPU is its end.
    """

    work: list[ScheduledSequence]
    computed: list[int]
    tokens: SampledTokens | PendingTokens
    device: str
    started: float
    built: float
    launched: float
    sample_rows: list[SampleRow] = []
    slices: list[slice] | None = None
    encoded: int = 0


class ModelRunner:
    """Runner of a step over the KV cache; a failed call is retried for each sequence alone.

    `pending`: with a `decoder`, the decode step that was launched last, until its tokens are read.
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
        context: int,
        clock: Callable[[], float],
        adapters: Adapters | None,
        speculation: PromptLookup | None,
        sources: SourceEncoder | None = None,
        decoder: RecordedDecoder | None = None,
    ) -> None:
        self._step, self._cache, self._step_inputs, self._sampler = step, cache, batch, sampler
        self._scheduler, self._request_manager, self._statistics = scheduler, request_manager, statistics
        self._clock, self._context = clock, context
        self._adapters, self._speculation = adapters, speculation
        self._states, self._sources, self._decoder = scheduler.state_rows, sources, decoder
        self.pending: LaunchedStep | None = None
        self._read_at = 0.0

    def run(self, work: list[ScheduledSequence]) -> None:
        """Launch a step, and apply its tokens unless they can be read later.

        When the model fails, each sequence runs once more alone, so that only a bad one fails.
        """
        decode = all(
            s.num_output_tokens
            and size == 1
            and s.num_computed_tokens + 1 == len(s.tokens)
            and s.source_ready
            for s, size in work
        )
        if decode and (launched := self._launch_on_device(work)) is not None:
            self.pending = launched
            return
        try:
            launched = self._launch(work, decode=decode)
        except FAILURES as error:
            self._failed(work, error)
        else:
            self._apply(launched)

    def go_on(self) -> None:
        """Launch the step after the pending one, if that does not depend on the host, and apply the pending one."""
        last, self.pending = self.pending, None
        if last is None:
            return
        work = schedule_ahead(self._scheduler, last.work, last.computed, self._context)
        if work and (launched := self._launch_on_device(work, ahead=1)) is not None:
            self.pending = launched
            for item in work:
                self._scheduler.fair_shares.charge(item.sequence, 1, output=True)
            self._statistics.steps += 1
        self._apply(last)

    def _launch_on_device(self, work: list[ScheduledSequence], ahead: int = 0) -> LaunchedStep | None:
        """Launch a decode step whose tokens the device samples, `ahead` 1 on top of the pending one.

        None if it can't run there, also after an error: the plain way then finds out whose that is.
        """
        if self._decoder is None:
            return None
        started, sequences = self._clock(), [sequence for sequence, _ in work]
        try:
            inputs = self._step_inputs.decode(sequences, ahead)
            built = self._clock()
            tokens = self._decoder.launch(inputs, sequences, ahead)
        except FAILURES:
            return None
        if tokens is None:
            return None
        computed = [sequence.num_computed_tokens + ahead for sequence in sequences]
        return LaunchedStep(work, computed, tokens, "cuda", started, built, self._clock())

    def _launch(self, work: list[ScheduledSequence], *, decode: bool = False) -> LaunchedStep:
        """Run a step; logprobs of prompts are kept at once. `decode`: it is one next token of each sequence."""
        started = self._clock()
        sequences = [sequence for sequence, _ in work]
        computed = [sequence.num_computed_tokens for sequence in sequences]
        slices: list[slice] | None = None
        rows, scored, encoded = list[int](), list[PromptRows](), 0
        by_parameters = decode and all(sequence.fast_decode for sequence in sequences)
        if decode:
            sample_rows = [] if by_parameters else [SampleRow(s, row) for row, s in enumerate(sequences)]
            inputs = self._step_inputs.decode(sequences)
        else:
            for sequence in sequences:
                if sequence.state.started_at is None:
                    sequence.state.started_at = started
            if self._sources is not None:
                with torch.inference_mode():
                    encoded = self._sources.encode(work)
            scored = prompt_logit_rows(work, rows)
            sample_rows, slices = self._request_manager.sample_rows(work, rows)
            inputs = self._step_inputs.build(work, rows)
        self._add_persistent_inputs(inputs, work)
        built = self._clock()
        with torch.inference_mode():
            logits = self._step.run(inputs)["logits"]
            launched = self._clock()
            scores = compute_prompt_logprobs(scored, logits)
            if by_parameters:
                tokens = SampledTokens(self._sampler.draw(logits, sequences), {})
            else:
                tokens = self._sampler(logits, sample_rows) if sample_rows else SampledTokens([], {})
        for state, values in scores:
            state.add_prompt_logprobs(values)
        times = (started, built, launched)
        return LaunchedStep(work, computed, tokens, logits.device.type, *times, sample_rows, slices, encoded)

    def _apply(self, step: LaunchedStep) -> None:
        """Read the tokens of a step, waiting for them, and apply them."""
        sampled = step.tokens.read() if isinstance(step.tokens, PendingTokens) else step.tokens
        read = self._clock()
        if step.slices is None:
            prefill, decoded = 0, len(step.work)
            self._apply_decode(step, sampled)
        else:
            prefill = step.encoded + sum(item.num_tokens for item in step.work if not item.is_decode)
            decoded = self._request_manager.apply(step.work, step.sample_rows, step.slices, sampled)
        waited = read - max(step.launched, self._read_at)
        times = (step.built - step.started, step.launched - step.built, waited, self._clock() - read)
        self._statistics.count(prefill, decoded, times)
        if self._speculation is not None and not prefill:
            seconds = step_seconds(step.device, max(step.built, self._read_at), step.launched, read)
            tokens = sum(item.num_tokens for item in step.work)
            self._speculation.measured(tokens, len(step.work), seconds)
        self._read_at = read

    def _apply_decode(self, step: LaunchedStep, sampled: SampledTokens) -> None:
        for row, ((sequence, _), computed, token) in enumerate(
            zip(step.work, step.computed, sampled.tokens, strict=True)
        ):
            if sequence.finished or sequence.num_computed_tokens != computed:
                continue  # ended, or its last token is sampled anew
            if token == UNDECIDED and self._decoder is not None:
                self._decoder.forget(sequence)
            else:
                self._request_manager.append(sequence, token, sampled.logprobs.get(row))

    def _add_persistent_inputs(self, inputs: dict[str, Tensor], work: Many[ScheduledSequence]) -> None:
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
        if len(work) == 1:
            self._statistics.failed += 1
            self._request_manager.close_all(work[0].sequence, "error", *error_fields(error))
            return
        for item in work:
            if item.sequence.finished:  # with another completion of its request, just now
                continue
            try:
                launched = self._launch([item])
            except FAILURES as own:
                self._failed([item], own)
            else:
                self._apply(launched)


def step_seconds(device: str, built: float, launched: float, read: float) -> float:
    """Return the seconds of a step.

    On other devices than the CPU the call returns before its work is done: the copy of the tokens to the host ends it.
    """
    return (launched if device == "cpu" else read) - built
