"""Engine of a language model: takes requests and runs the model step by step, many sequences per step.

One thread owns an engine. `step()` schedules (scheduler), builds inputs (step_inputs), runs the model and samples
(model_runner), applies the tokens and returns outputs (request_manager, which knows the state of each request).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

import msgspec
import torch

from ...errors import InputError
from ..lora.adapters import Adapters
from ..step.graph_inputs import Bucket, decode_buckets, mixed_buckets, mixed_sizes
from ..step.step_shape import StepShape
from ..text.detokenize import DetokenizerFactory
from ..text.grammar.grammar import GrammarCache
from .cache.block_manager import BlockManager, new_cache
from .cache.cache_sizing import CacheSizes
from .cache.state_rows import StateRows
from .model_runner import ModelRunner
from .prompt_lookup import PromptLookup
from .recorded.decoder import RecordedDecoder
from .request_manager import RequestManager
from .requests import Output, Request
from .sampling.sampler import Sampler
from .scheduling.admission import Admission
from .scheduling.engine_limits import EngineLimits, default_limits
from .scheduling.integrity import check_integrity
from .scheduling.scheduler import Scheduler
from .source_encoder import SourceEncoder
from .stats import EngineStats
from .step_inputs import StepInputs
from .step_runner import StepRunner

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
        grammars: GrammarCache | None = None,
        speculation: PromptLookup | None = None,
        adapters: Adapters | None = None,
        device: str = "cpu",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits or default_limits(device)
        self.limits.check(shape.page)
        self.shape, self.eos_ids = shape, frozenset(eos_ids)
        sizes = CacheSizes.divide(shape, self.limits, kv_bytes, device)
        self.limits = msgspec.structs.replace(self.limits, max_running=sizes.max_running)
        self.cache = new_cache(shape.layers, sizes.pages, shape.page_bytes, device)
        self.block_manager = BlockManager(self.cache, shape.page, prefix_caching=self.limits.prefix_cache)
        self.state_rows = None
        if shape.state_floats:
            states = new_cache(1, sizes.state_rows, shape.state_bytes, device)[0].view(torch.float32)
            self.state_rows = StateRows(states, shape.page, sizes.snapshots)
        self.context = min(shape.max_positions, self.block_manager.num_pages * shape.page)
        self.scheduler = Scheduler(self.block_manager, self.limits, self.state_rows)
        self.statistics = EngineStats(pages_total=self.block_manager.num_pages, page=shape.page)
        self.adapters = adapters
        if adapters is None and shape.adapters is not None:
            self.adapters = Adapters(shape.adapters, device)
        self._clock, self._grammars = clock, grammars
        # Drafts that are rejected have changed the state already; those of an encoder-decoder would be of its source.
        exact = self.limits.batch_invariant or self.state_rows is not None or shape.source is not None
        self._speculation = None if exact else speculation
        pages = self.block_manager.num_pages
        self._admission = Admission(
            self.limits, shape, self.context, texts=tokenizer is not None, pages=pages
        )
        self._request_manager = RequestManager(
            self.scheduler,
            self.statistics,
            pieces=None if tokenizer is None else DetokenizerFactory(tokenizer),
            grammars=grammars,
            speculation=self._speculation,
            adapters=self.adapters,
            eos_ids=self.eos_ids,
            context=self.context,
            source=shape.source,
        )
        self._model_runner = self._new_model_runner(step)

    def _new_model_runner(self, step: StepRunner) -> ModelRunner:
        shape, limits = self.shape, self.limits
        blocks = -(-self.context // shape.page)
        self._decoder = None
        graphs = getattr(step, "graphs", None)
        if graphs is not None and not limits.batch_invariant:
            self._decoder = RecordedDecoder(
                graphs,
                self.cache,
                running=limits.max_running,
                vocab_size=shape.vocab_size,
                end_ids=sorted(self.eos_ids),
                lock=getattr(step, "lock", contextlib.nullcontext()),
                logit_rows=max(bucket.num_rows for bucket in self._mixed_buckets()),
            )
        return ModelRunner(
            step,
            self.cache,
            StepInputs(limits.step_tokens, limits.max_running, blocks, shape.page),
            Sampler(shape.vocab_size, sorted(self.eos_ids)),
            self.scheduler,
            self._request_manager,
            self.statistics,
            context=self.context,
            clock=self._clock,
            adapters=self.adapters,
            speculation=self._speculation,
            sources=None if shape.source is None else SourceEncoder(step, shape, shape.source, self.cache),
            decoder=self._decoder,
        )

    def prepare(self) -> None:
        """Compile the kernels of every step on a GPU, and record all but the largest; the log tells how far it is."""
        if self._decoder is not None:
            blocks = -(-self.context // self.shape.page)
            sizes = mixed_sizes(min(self.limits.step_tokens, self.context + 1))
            buckets = [*decode_buckets(self.limits.max_running, blocks), *self._mixed_buckets()]
            self._decoder.prepare(buckets, sizes, self.shape.page)

    def _mixed_buckets(self) -> list[Bucket]:
        blocks, limits = -(-self.context // self.shape.page), self.limits
        most = min(limits.step_tokens, self.context * limits.max_running)
        return mixed_buckets(most, limits.max_running, blocks, drafts=self._speculation is not None)

    @property
    def idle(self) -> bool:
        """True when `step()` has nothing to run and no outputs to return."""
        return not self._request_manager.states and not self._request_manager.outputs

    def check(self, request: Request) -> None:
        """Admit a request, or raise the errors of `submit`; may be called from any thread."""
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
        """Check a request and begin with it.

        Raises `InputError` for a request that can't run (the message says why), `OverloadedError` when the queue is
        full.
        """
        self.check(request)
        self.begin(request)

    def begin(self, request: Request) -> None:
        """Queue a request that `check` admitted; its outputs come from `step()`."""
        if request.id in self._request_manager.states:
            raise InputError(f"a request {request.id!r} is already running", where="id")
        self._request_manager.begin(request, self._clock(), self.limits.aging)

    def cancel(self, request_id: str) -> None:
        """End a request: its pages are free at once, its last output comes with the next `step()`.

        Unknown ids are ignored.
        """
        state = self._request_manager.states.get(request_id)
        if state is not None:
            self._request_manager.drop(state, "cancelled")
            self.statistics.cancelled += 1

    def step(self) -> list[Output]:
        """Run one step and return its outputs; [] when there is nothing to run."""
        start, runner = self._clock(), self._model_runner
        if runner.pending is not None:
            runner.go_on()
            if runner.pending is not None or self._request_manager.outputs:
                return self._take_outputs()
        self._draft_tokens()
        work = self.scheduler.schedule()
        if work:
            groups = [[item] for item in work] if self.limits.batch_invariant else [work]
            self.statistics.scheduling_seconds += self._clock() - start
            for group in groups:
                runner.run(group)
            self.statistics.steps += 1
        return self._take_outputs()

    def _take_outputs(self) -> list[Output]:
        outputs, self._request_manager.outputs = self._request_manager.outputs, []
        return outputs

    def stats(self) -> EngineStats:
        """Return a copy of the counters, with the numbers of running and waiting sequences and used pages."""
        scheduler, block_manager = self.scheduler, self.block_manager
        return msgspec.structs.replace(
            self.statistics,
            step_tokens=list(self.statistics.step_tokens),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages_used=block_manager.num_used,
            cached_tokens=block_manager.num_cached * block_manager.page_size,
            preemptions=scheduler.preemptions,
            evictions=block_manager.evictions,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
        )

    def check_integrity(self) -> None:
        """Raise `InferError` when pages, sequences and counts do not agree."""
        check_integrity(self.scheduler, self._request_manager.live())

    def _draft_tokens(self) -> None:
        """Draft tokens for the sequences that decode, never beyond the last token they may have."""
        if self._speculation is None:
            return
        for sequence in self.scheduler.running:
            if sequence.speculator is None or len(sequence.tokens) - sequence.num_computed_tokens != 1:
                continue
            left = sequence.state.sampling.max_tokens - sequence.num_output_tokens - 1
            limit = min(left, self.context - len(sequence.tokens) - 1, self.limits.max_draft)
            if sequence.num_output_tokens:
                sequence.draft_tokens = sequence.draft(limit)
