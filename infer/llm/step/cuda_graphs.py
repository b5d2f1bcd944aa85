"""Steps on NVIDIA GPUs as CUDA graphs, one for each bucket of `graph_inputs`: decode steps, and any others.

A step is copied into buffers at fixed addresses, padded to the bucket, and replayed; one too large for every bucket
(`graph_inputs.TOKENS`) runs as it is: there the work hides its launches. Padding rows are sequences of one token that
is not kept (slot -1): they read the first token of page 0 and write nothing. A bucket is recorded when it first occurs,
or by `prepare`. When recording a bucket fails its steps run as they are, the other buckets are recorded, and `findings`
says why.

Everything that a graph depends on is an address or a shape: the attention kernels read lengths on the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...spec import Finding
from ..lora.layers import INDEX
from .cuda_recorder import CudaRecorder, Recorder
from .graph_inputs import Bucket, Buffers, bucket_of, mixed_bucket_of, mixed_inputs

log = logging.getLogger("infer.llm")


class _RecordedGraph(NamedTuple):
    buffers: Buffers
    replay: Callable[[], object]
    logits: Tensor  # [rows, vocab], overwritten by each replay


class SharedTensors(NamedTuple):
    """Tensors on the device that graphs of every bucket use, where sampling is recorded too.

    A token id of -1 - row in the inputs of a step stands for `last_tokens[row]`.
    """

    logits: Tensor  # float32 [most rows of a bucket, vocab]
    last_tokens: Tensor  # int64 [rows]


class GraphedStep:
    """Step under CUDA graphs, one call at a time; the graphs belong to one cache, another one discards them.

    `findings`: buckets recorded, and why one could not be.
    """

    def __init__(self, step: Any, device: str, recorder: Recorder) -> None:
        self.step, self.device, self.recorder = step, device, recorder
        self.inputs, self.outputs = getattr(step, "inputs", ()), getattr(step, "outputs", ())
        self.findings: list[Finding] = []
        self.refused: dict[Bucket, str] = {}  # bucket → reason
        self.shared: SharedTensors | None = None
        self._copied = recorder.new_event()  # what was staged last is on the device
        self._cache: Tensor | None = None
        self._recorded: dict[Bucket, _RecordedGraph] = {}
        # Buckets of steps that are not decode steps: once prepared, no other is recorded in the middle of traffic.
        self._prepared: set[Bucket] = set()

    @property
    def graphs(self) -> GraphedStep:
        return self

    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        with torch.inference_mode():
            logits = self.launch(inputs)
            if logits is None:
                return self.step.run(inputs)
            return {"logits": logits[: len(inputs["logit_rows"])].clone()}

    def launch(self, inputs: Mapping[str, Tensor]) -> Tensor | None:
        """Replay the graph of a step; returns logits [rows of the bucket, vocab], or None without a graph."""
        bucket = bucket_of(inputs) or self._mixed_bucket(inputs)
        if bucket is None:
            return None
        found = self._graph_for(bucket, inputs["kv_cache"])
        if found is None:
            return None
        self._copied.synchronize()
        found.buffers.fill(inputs)
        self.recorder.enqueue(found.buffers.copy_to_device)
        self._copied.record()
        found.replay()
        return found.logits

    def share(self, shared: SharedTensors) -> None:
        """Set the tensors that all graphs share; graphs recorded with other tensors are discarded."""
        if self.shared is not shared:
            self.shared = shared
            self._clear()

    def is_recorded(self, bucket: Bucket, cache: Tensor) -> bool:
        """Return True if a bucket is recorded, or could be recorded now."""
        with torch.inference_mode():
            return self._graph_for(bucket, cache) is not None

    def prepare(self, kv_cache: Tensor, buckets: Iterable[Bucket]) -> None:
        """Record buckets before the first request, which compiles their kernels too; the log tells how far it is."""
        wanted = list(buckets)
        self._prepared |= {bucket for bucket in wanted if bucket.tokens}
        with torch.inference_mode():
            for number, bucket in enumerate(wanted, 1):
                self._graph_for(bucket, kv_cache)
                log.info("CUDA graph %d of %d: %s", number, len(wanted), bucket)

    def warm(self, kv_cache: Tensor, sizes: Iterable[int], page: int) -> None:
        """Run mixed steps of these numbers of tokens, which write nothing, so that their kernels are compiled."""
        for tokens in sizes:
            try:
                with torch.inference_mode():
                    self.step.run({**mixed_inputs(tokens, page), "kv_cache": kv_cache})
            except Exception as error:  # noqa: BLE001 - of CUDA, of Triton's compiler, out of memory
                why = first_line(error)
                log.warning("a step of %d tokens failed: %s", tokens, why)
                self.findings.append(Finding("open", f"warm-up of {tokens} tokens", "failed", why=why))
            else:
                log.info("kernels of %d tokens are ready", tokens)

    def close(self) -> None:
        self._recorded.clear()
        self._cache = None
        self.step.close()

    def _mixed_bucket(self, inputs: Mapping[str, Tensor]) -> Bucket | None:
        bucket = mixed_bucket_of(inputs, max((one.blocks for one in self._prepared), default=0))
        if bucket is None or (self._prepared and bucket not in self._prepared):
            return None
        fits = self.shared is None or bucket.num_rows <= len(self.shared.logits)
        return bucket if fits else None

    def _graph_for(self, bucket: Bucket, cache: Tensor) -> _RecordedGraph | None:
        if self._cache is None or self._cache.data_ptr() != cache.data_ptr():
            self._clear()
            self._cache = cache  # held, so that its address is not given to another
        if bucket not in self._recorded and bucket not in self.refused:
            self._record(bucket, cache)
        return self._recorded.get(bucket)

    def _clear(self) -> None:
        if self._recorded:
            self._recorded.clear()
            self.recorder.clear()
        self.refused.clear()

    def _record(self, bucket: Bucket, cache: Tensor) -> None:
        what = f"CUDA graph of {bucket}"
        try:
            buffers = Buffers(bucket, self.device)
            named = {**buffers.inputs, "kv_cache": cache}
            self._recorded[bucket] = _RecordedGraph(
                buffers, *self.recorder.record(lambda: self._logits_of(named))
            )
        except Exception as error:  # noqa: BLE001 - of CUDA, of Triton's compiler, out of memory
            why = first_line(error)
            self.refused[bucket] = why
            log.warning("no %s: %s; its steps run as they are", what, why)
            self.findings.append(Finding("open", what, "refused", why=why))
        else:
            self.findings.append(Finding("open", what, "recorded"))

    def _logits_of(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Run the step on the inputs of a bucket; the call that is recorded."""
        if self.shared is None:
            logits: Tensor = self.step.run(inputs)["logits"]
            return logits
        ids = inputs["token_ids"]
        sampled = self.shared.last_tokens[(-1 - ids).clamp_min(0)]
        named = {**inputs, "token_ids": torch.where(ids < 0, sampled, ids)}
        into = self.shared.logits[: len(inputs["logit_rows"])]
        return into.copy_(self.step.run(named)["logits"])


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its type."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def wrap(step: Any, device: str) -> Any:
    """`step` under CUDA graphs where `device` is a CUDA one, without adapters, state layers and sources."""
    names = {spec.name for spec in getattr(step, "inputs", ())}
    graphed = device.startswith("cuda") and not names & {INDEX, "state_cache", "source_table"}
    return GraphedStep(step, device, CudaRecorder(device)) if graphed else step
