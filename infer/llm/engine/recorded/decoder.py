"""Decoder of recorded steps: launches model and sampler, and hands out tokens that are read when they are there."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....spec import Finding
from ...step.cuda_graphs import GraphedStep, SharedTensors, first_line
from ...step.cuda_recorder import Event
from ...step.graph_inputs import LARGEST, Bucket, bucket_of
from ..sampling.sampler import SampledTokens, sampling_columns
from ..sampling.sampler_device import greedy, is_cut, sample
from ..sequence import Sequence
from .sampling_tensors import SamplingTensors, is_constrained

log = logging.getLogger("infer.llm")
GREEDY, WHOLE, CUT, CONSTRAINED = KINDS = (
    "greedy",
    "whole",
    "cut",
    "constrained",
)  # each costs more than the one before


class PendingTokens(NamedTuple):
    """Tokens that a launched step samples; they stay until the second launch after it."""

    tokens: Tensor  # int64 [sequences], on the host
    copied: Event

    def read(self) -> SampledTokens:
        """Wait for the step; a token below 0 is what `sampler_device.sample` says."""
        self.copied.synchronize()
        return SampledTokens(self.tokens.tolist(), {})


class RecordedDecoder:
    """Decode steps of one cache on the graphs of `graphs`, of up to `running` sequences.

    A step is two replays, of the bucket's model and of a sampler for its batch and kind, with one copy to the device
    before and one of the tokens to the host after. `lock` is held while a step is launched. `logit_rows`: of the
    largest bucket of the other steps, whose tokens the host samples.
    """

    def __init__(
        self,
        graphs: GraphedStep,
        cache: Tensor,
        *,
        running: int,
        vocab_size: int,
        end_ids: Many[int],
        lock: AbstractContextManager[Any],
        logit_rows: int = 0,
    ) -> None:
        self._graphs, self._cache, self._lock = graphs, cache, lock
        self._recorder, device = graphs.recorder, graphs.device
        rows = 1 << (min(running, LARGEST) - 1).bit_length()
        self._tensors = SamplingTensors(rows, running, vocab_size, end_ids, device, self._recorder)
        logits = torch.zeros(max(rows, logit_rows), vocab_size, device=device)
        self._shared = SharedTensors(logits, self._tensors.last_tokens)
        self._samplers: dict[tuple[int, str], tuple[Any, Tensor] | None] = {}
        pinned = device.startswith("cuda")
        self._pending = [
            PendingTokens(torch.zeros(rows, dtype=torch.int64, pin_memory=pinned), self._recorder.new_event())
            for _ in range(2)
        ]

    def prepare(self, buckets: Iterable[Bucket], sizes: Iterable[int] = (), page: int = 1) -> None:
        """Run steps of `sizes` tokens, then record every bucket and its samplers; the log tells how far it is."""
        wanted = list(buckets)
        with self._lock, torch.inference_mode():
            self._graphs.share(self._shared)
            self._graphs.warm(self._cache, sizes, page)
            self._graphs.prepare(self._cache, wanted)
            batches = sorted({bucket.batch for bucket in wanted if not bucket.tokens})
            for number, batch in enumerate(batches, 1):
                for kind in KINDS:
                    self._sampler(batch, kind)
                log.info("CUDA graphs of samplers %d of %d: %d sequences", number, len(batches), batch)

    def launch(
        self, inputs: Mapping[str, Tensor], sequences: Many[Sequence], ahead: int
    ) -> PendingTokens | None:
        """Launch a decode step; None, and nothing done, for one that is not recorded or needs the host.

        `ahead`: number of tokens of each sequence that are sampled, but not read. Raises `GrammarError`.
        """
        bucket = bucket_of(inputs)
        if bucket is None or any(sequence.sampled_on_host for sequence in sequences):
            return None
        with self._lock, torch.inference_mode():
            self._graphs.share(self._shared)
            columns = sampling_columns(sequences, ahead=ahead)
            sampler = self._sampler(bucket.batch, self._kind(sequences, columns))
            if sampler is None or not self._graphs.is_recorded(bucket, self._cache):
                return None
            if not self._tensors.stage(sequences, columns, bucket.batch, ahead):
                return None
            self._graphs.launch({**inputs, "kv_cache": self._cache})
            replay, tokens = sampler
            replay()
            return self._read_back(tokens, len(sequences))

    def forget(self, sequence: Sequence) -> None:
        """Discard the device's sampled token of a sequence and continue it on the host sampler."""
        sequence.sampled_on_host = True
        self._tensors.forget(sequence)

    def _read_back(self, tokens: Tensor, count: int) -> PendingTokens:
        self._pending.reverse()
        whole = self._pending[0]
        self._recorder.enqueue(lambda: whole.tokens[: len(tokens)].copy_(tokens, non_blocking=True))
        whole.copied.record()
        return whole._replace(tokens=whole.tokens[:count])

    def _sampler(self, batch: int, kind: str) -> tuple[Any, Tensor] | None:
        """Return the replay of a sampler and its tokens, recorded when it is first needed; None if that failed."""
        if (batch, kind) not in self._samplers:
            self._tensors.clear()
            try:
                self._samplers[batch, kind] = self._recorder.record(lambda: self._sampled(batch, kind))
            except Exception as error:  # noqa: BLE001 - of CUDA, of Triton's compiler, out of memory
                self._samplers[batch, kind] = None
                what = f"CUDA graph of the {kind} sampler of {batch} sequences"
                why = first_line(error)
                log.warning("no %s: %s; its steps are sampled one operator at a time", what, why)
                self._graphs.findings.append(Finding("open", what, "refused", why=why))
        return self._samplers[batch, kind]

    def _sampled(self, batch: int, kind: str) -> Tensor:
        """Sample the first rows of the logits; the call that is recorded."""
        tensors, logits = self._tensors, self._shared.logits[:batch]
        if kind == CONSTRAINED:
            logits = tensors.constrained(logits)
        tokens = (
            greedy(logits) if kind == GREEDY else sample(logits, tensors.parameters(batch), cut=kind != WHOLE)
        )
        if kind == CONSTRAINED:
            tensors.count(tokens)
        tensors.last_tokens.scatter_(0, tensors.place(batch)[0], tokens.clamp_min(0))
        return tokens

    def _kind(self, sequences: Many[Sequence], columns: np.ndarray) -> str:
        """Return the cheapest sampler that is right for all sequences."""
        if any(map(is_constrained, sequences)):
            return CONSTRAINED
        if not columns[:, 0].any():
            return GREEDY
        return CUT if is_cut(columns, self._tensors.vocab_size) else WHOLE
