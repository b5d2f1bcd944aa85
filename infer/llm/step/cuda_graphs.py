"""Decode steps on NVIDIA GPUs as CUDA graphs, one for each bucket of batch size and block-table width.

A step that gives each sequence one token is copied into buffers at fixed addresses, padded to the bucket, and replayed;
any other step (prefill, mixed, drafts) runs as it is. Padding rows are sequences of one token that is not kept (slot
-1): they read the first token of page 0 and write nothing. A bucket is recorded when it first occurs, or by `prepare`.
When recording a bucket fails its steps run as they are, the other buckets are recorded, and `findings` says why.

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

log = logging.getLogger("infer.llm")
LARGEST = 256  # sequences; beyond, a launch costs little beside the work
NARROWEST = 8  # blocks
_ALIGNMENT = 256  # bytes


class Bucket(NamedTuple):
    """Sizes of a CUDA graph: sequences, and blocks of the block table."""

    batch: int
    blocks: int


def bucket_of(inputs: Mapping[str, Tensor]) -> Bucket | None:
    """Return the smallest bucket for a decode step on the host, or None: batch a power of two, blocks 8·4ⁿ."""
    count, blocks = inputs["block_table"].shape
    tokens, rows = len(inputs["token_ids"]), len(inputs["logit_rows"])
    if tokens != count or rows > count or not 0 < count <= LARGEST:
        return None
    starts = inputs["query_start"]
    if starts.device.type != "cpu" or not torch.equal(starts, torch.arange(count + 1, dtype=starts.dtype)):
        return None
    width = NARROWEST
    while width < blocks:
        width *= 4
    return Bucket(1 << (count - 1).bit_length(), width)


def decode_buckets(max_running: int, blocks: int) -> list[Bucket]:
    """List every bucket of decode steps of up to `max_running` sequences of up to `blocks` pages; narrow ones first."""
    widths = [NARROWEST]
    while widths[-1] < blocks:
        widths.append(4 * widths[-1])
    last = (min(max_running, LARGEST) - 1).bit_length()
    return [Bucket(1 << power, width) for width in widths for power in range(last + 1)]


class Buffers:
    """Inputs of a bucket at fixed addresses: pinned bytes on the host, and their copy on the device."""

    def __init__(self, bucket: Bucket, device: str) -> None:
        batch = bucket.batch
        sizes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "token_ids": (torch.int64, (batch,)),
            "positions": (torch.int64, (batch,)),
            "slot_mapping": (torch.int64, (batch,)),
            "logit_rows": (torch.int64, (batch,)),
            "query_start": (torch.int32, (batch + 1,)),
            "seq_lens": (torch.int32, (batch,)),
            "block_table": (torch.int32, tuple(bucket)),
        }
        starts, total = {}, 0
        for name, (dtype, shape) in sizes.items():
            starts[name] = total
            total += -(-torch.Size(shape).numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self._host = torch.zeros(total, dtype=torch.uint8, pin_memory=device.startswith("cuda"))
        self._device = torch.zeros(total, dtype=torch.uint8, device=device)

        def cut(whole: Tensor) -> dict[str, Tensor]:
            return {
                name: whole[starts[name] :][: torch.Size(shape).numel() * dtype.itemsize]
                .view(dtype)
                .view(shape)
                for name, (dtype, shape) in sizes.items()
            }

        self._staged, self.inputs = cut(self._host), cut(self._device)
        self._staged["query_start"].copy_(torch.arange(batch + 1))
        self.fill({})
        self.copy_to_device()

    def fill(self, inputs: Mapping[str, Tensor]) -> None:
        """Stage a decode step, the other rows as padding; all rows are padding without inputs."""
        count = len(inputs["token_ids"]) if inputs else 0
        staged = self._staged
        for name in ("token_ids", "positions", "slot_mapping", "seq_lens"):
            if count:
                staged[name][:count] = inputs[name]
        staged["token_ids"][count:], staged["positions"][count:] = 0, 0
        staged["slot_mapping"][count:], staged["seq_lens"][count:] = -1, 1
        rows = len(inputs["logit_rows"]) if inputs else 0
        if count:
            staged["logit_rows"][:rows] = inputs["logit_rows"]
            table = inputs["block_table"]
            staged["block_table"][:count, : table.shape[1]] = table
        staged["logit_rows"][rows:] = 0
        staged["block_table"][count:, :1] = 0

    def copy_to_device(self) -> None:
        """Enqueue the copy of what is staged, which may not change until it is done."""
        self._device.copy_(self._host, non_blocking=True)


class _RecordedGraph(NamedTuple):
    buffers: Buffers
    replay: Callable[[], object]
    logits: Tensor  # [batch, vocab], overwritten by each replay


class SharedTensors(NamedTuple):
    """Tensors on the device that graphs of every bucket use, where sampling is recorded too.

    A token id of -1 - row in the inputs of a step stands for `last_tokens[row]`.
    """

    logits: Tensor  # float32 [sequences, vocab]
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
        """Replay the graph of a decode step; returns logits [batch of the bucket, vocab], or None without a graph."""
        bucket = bucket_of(inputs)
        found = None if bucket is None else self._graph_for(bucket, inputs["kv_cache"])
        if found is None:
            return None
        self._copied.synchronize()
        found.buffers.fill(inputs)
        self.recorder.enqueue(found.buffers.copy_to_device)
        self._copied.record()
        found.replay()
        return found.logits

    def share(self, shared: SharedTensors) -> None:
        """Let all graphs use these tensors from now on; those that were recorded with others are discarded."""
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
        with torch.inference_mode():
            for number, bucket in enumerate(wanted, 1):
                self._graph_for(bucket, kv_cache)
                log.info("CUDA graph %d of %d: %d sequences, %d pages each", number, len(wanted), *bucket)

    def close(self) -> None:
        self._recorded.clear()
        self._cache = None
        self.step.close()

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
        what = f"CUDA graph of {bucket.batch} sequences, {bucket.blocks} pages each"
        try:
            buffers = Buffers(bucket, self.device)
            named = {**buffers.inputs, "kv_cache": cache}
            self._recorded[bucket] = _RecordedGraph(
                buffers, *self.recorder.record(lambda: self._logits_of(named))
            )
        except RuntimeError as error:  # of CUDA, and out of memory
            why = str(error).strip().partition("\n")[0] or type(error).__name__
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
        into = self.shared.logits[: len(ids)]
        return into.copy_(self.step.run(named)["logits"])


def wrap(step: Any, device: str) -> Any:
    """`step` under CUDA graphs where `device` is a CUDA one, without adapters, state layers and sources."""
    names = {spec.name for spec in getattr(step, "inputs", ())}
    graphed = device.startswith("cuda") and not names & {INDEX, "state_cache", "source_table"}
    return GraphedStep(step, device, CudaRecorder(device)) if graphed else step
