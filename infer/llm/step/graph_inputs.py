"""Inputs of steps under CUDA graphs: buckets of decode steps, their buffers at fixed addresses, and padding."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

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


def mixed_sizes(step_tokens: int) -> list[int]:
    """List the numbers of tokens of steps to warm up: powers of two, after which kernels differ, and the most."""
    return [*(1 << power for power in range(1, (step_tokens - 1).bit_length())), step_tokens]


def mixed_inputs(tokens: int, page: int) -> dict[str, Tensor]:
    """Build a step of a sequence that decodes and, beyond one token, a prompt; all of it padding in page 0."""
    new = [1, tokens - 1][: min(tokens, 2)]
    return {
        "token_ids": torch.zeros(tokens, dtype=torch.int64),
        "positions": torch.cat([torch.arange(count) for count in new]),
        "slot_mapping": torch.full((tokens,), -1),
        "block_table": torch.zeros(len(new), -(-max(new) // page), dtype=torch.int32),
        "query_start": torch.tensor([0, *itertools.accumulate(new)], dtype=torch.int32),
        "seq_lens": torch.tensor(new, dtype=torch.int32),
        "logit_rows": torch.tensor([total - 1 for total in itertools.accumulate(new)]),
    }


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
