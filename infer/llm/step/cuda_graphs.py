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
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...spec import Finding
from ..lora.layers import INDEX

log = logging.getLogger("infer.llm")
LARGEST = 256  # sequences; beyond, a launch costs little beside the work
NARROWEST = 8  # blocks
WARM = 2  # plain calls before recording: kernels are compiled, libraries set up
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
        self._device.copy_(self._host, non_blocking=True)


class Recorder(Protocol):
    """Records and replays calls on a device."""

    def record(self, call: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """Warm `call` up and record it: a function that replays it, and its result. Raises RuntimeError."""

    def clear(self) -> None:
        """Forget the memory of what was recorded; its replays are not called again."""

    def mark_copy(self) -> None:
        """Note that the staged bytes are being copied."""

    def wait_for_copy(self) -> None:
        """Wait until the staged bytes are copied."""


class CudaRecorder:
    """CUDA graphs of one device in one memory pool: they run one after the other and keep only their results.

    The stream is its own, because torch keeps a workspace of cuBLAS for each stream and frees it with a graph's pool;
    a pool is never used again once its graphs are gone.
    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self.device)
        self._copied = torch.cuda.Event()

    def clear(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, call: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        with torch.cuda.device(self.device):
            side, current = self._stream, torch.cuda.current_stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(WARM):
                    call()
            current.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Only this thread is watched: others may allocate meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
                result = call()
            return graph.replay, result

    def mark_copy(self) -> None:
        self._copied.record(torch.cuda.current_stream(self.device))

    def wait_for_copy(self) -> None:
        self._copied.synchronize()


class _RecordedGraph(NamedTuple):
    buffers: Buffers
    replay: Callable[[], object]
    logits: Tensor  # [batch, vocab], overwritten by each replay


class GraphedStep:
    """Step under CUDA graphs, one call at a time; the graphs belong to one cache, another one discards them.

    `findings`: buckets recorded, and why one could not be.
    """

    def __init__(self, step: Any, device: str, recorder: Recorder) -> None:
        self.step, self.device, self.recorder = step, device, recorder
        self.inputs, self.outputs = getattr(step, "inputs", ()), getattr(step, "outputs", ())
        self.findings: list[Finding] = []
        self.refused: dict[Bucket, str] = {}  # bucket → reason
        self._cache: Tensor | None = None
        self._recorded: dict[Bucket, _RecordedGraph] = {}

    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        bucket = bucket_of(inputs)
        with torch.inference_mode():
            found = None if bucket is None else self._graph_for(bucket, inputs["kv_cache"])
            if found is None:
                return self.step.run(inputs)
            self.recorder.wait_for_copy()
            found.buffers.fill(inputs)
            found.buffers.copy_to_device()
            self.recorder.mark_copy()
            found.replay()
            return {"logits": found.logits[: len(inputs["logit_rows"])].clone()}

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
            if self._recorded:
                self._recorded.clear()
                self.recorder.clear()
            self.refused.clear()
            self._cache = cache  # held, so that its address is not given to another
        if bucket not in self._recorded and bucket not in self.refused:
            self._record(bucket, cache)
        return self._recorded.get(bucket)

    def _record(self, bucket: Bucket, cache: Tensor) -> None:
        what = f"CUDA graph of {bucket.batch} sequences, {bucket.blocks} pages each"
        try:
            buffers = Buffers(bucket, self.device)
            named = {**buffers.inputs, "kv_cache": cache}
            self._recorded[bucket] = _RecordedGraph(
                buffers, *self.recorder.record(lambda: self.step.run(named)["logits"])
            )
        except RuntimeError as error:  # of CUDA, and out of memory
            why = str(error).strip().partition("\n")[0] or type(error).__name__
            self.refused[bucket] = why
            log.warning("no %s: %s; its steps run as they are", what, why)
            self.findings.append(Finding("open", what, "refused", why=why))
        else:
            self.findings.append(Finding("open", what, "recorded"))


def wrap(step: Any, device: str) -> Any:
    """`step` under CUDA graphs where `device` is a CUDA one, without adapters, state layers and sources."""
    names = {spec.name for spec in getattr(step, "inputs", ())}
    graphed = device.startswith("cuda") and not names & {INDEX, "state_cache", "source_table"}
    return GraphedStep(step, device, CudaRecorder(device)) if graphed else step
