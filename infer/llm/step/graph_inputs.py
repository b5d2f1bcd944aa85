"""Inputs of steps under CUDA graphs: buckets of steps, their buffers at fixed addresses, and padding.

Decode steps have buckets of their own. Any other step (prompts, prompts beside decoding sequences, drafts) has one of
more tokens than sequences. Each padding sequence has one padding token; those left over belong to no sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = 256  # sequences; beyond, a launch costs little beside the work
NARROWEST = 8  # blocks
# Sizes of other steps: tokens up to the number at which the work hides its launches, and sequences. Up to 256 tokens
# the weights are read in the time that the products take; beyond, a bucket has at most a quarter of padding.
TOKENS = (16, 32, 64, 128, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
BATCHES = (8, 64, LARGEST)
_ALIGNMENT = 256  # bytes


class Bucket(NamedTuple):
    """Sizes of a CUDA graph: sequences, blocks of the block table, tokens and rows of logits (0: one a sequence)."""

    batch: int
    blocks: int
    tokens: int = 0
    rows: int = 0

    @property
    def num_tokens(self) -> int:
        return self.tokens or self.batch

    @property
    def num_rows(self) -> int:
        return self.rows or self.batch

    def __str__(self) -> str:
        if not self.tokens:
            return f"{self.batch} sequences, {self.blocks} pages each"
        sizes = f"{self.tokens} tokens of {self.batch} sequences, {self.blocks} pages each"
        return sizes if self.num_rows == self.batch else f"{sizes}, {self.rows} rows of logits"


def bucket_of(inputs: Mapping[str, Tensor]) -> Bucket | None:
    """Return the smallest bucket for a decode step on the host, or None: batch a power of two, blocks 8·4ⁿ."""
    count, blocks = inputs["block_table"].shape
    tokens, rows = len(inputs["token_ids"]), len(inputs["logit_rows"])
    if tokens != count or rows > count or not 0 < count <= LARGEST:
        return None
    starts = inputs["query_start"]
    if starts.device.type != "cpu" or not torch.equal(starts, torch.arange(count + 1, dtype=starts.dtype)):
        return None
    return Bucket(1 << (count - 1).bit_length(), width_of(blocks))


def width_of(blocks: int) -> int:
    """Return the smallest 8·4ⁿ that is not below `blocks`."""
    width = NARROWEST
    while width < blocks:
        width *= 4
    return width


def mixed_bucket_of(inputs: Mapping[str, Tensor], widest: int = 0) -> Bucket | None:
    """Return the smallest bucket for any step on the host, at least `widest` blocks wide; None for one too large.

    Logits are of at most one token a sequence, or of up to `LARGEST` tokens, as drafts have them.
    """
    count, blocks = inputs["block_table"].shape
    tokens = next((size for size in TOKENS if size >= len(inputs["token_ids"])), None)
    batch = next((size for size in BATCHES if size >= count), None)
    if tokens is None or batch is None or count > tokens or inputs["query_start"].device.type != "cpu":
        return None
    batch = min(batch, tokens)
    rows = 0 if len(inputs["logit_rows"]) <= batch else tokens
    return Bucket(batch, max(width_of(blocks), widest), tokens, rows) if rows <= LARGEST else None


def mixed_buckets(step_tokens: int, max_running: int, blocks: int, *, drafts: bool) -> list[Bucket]:
    """List the buckets of steps that are not decode steps, of one width each, for up to `blocks` pages a sequence.

    `drafts`: steps in which several tokens of a sequence have logits.
    """
    sizes = TOKENS[: 1 + sum(size < step_tokens for size in TOKENS)]
    counts = BATCHES[: 1 + sum(count < max_running for count in BATCHES)]
    found = dict.fromkeys(
        Bucket(min(count, size), width_of(blocks), size) for size in sizes for count in counts
    )
    if drafts:
        found |= dict.fromkeys(
            bucket._replace(rows=bucket.tokens) for bucket in found if bucket.batch < bucket.tokens <= LARGEST
        )
    return list(found)


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
        batch, tokens = bucket.batch, bucket.num_tokens
        sizes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "token_ids": (torch.int64, (tokens,)),
            "positions": (torch.int64, (tokens,)),
            "slot_mapping": (torch.int64, (tokens,)),
            "logit_rows": (torch.int64, (bucket.num_rows,)),
            "query_start": (torch.int32, (batch + 1,)),
            "seq_lens": (torch.int32, (batch,)),
            "block_table": (torch.int32, (batch, bucket.blocks)),
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
        self._padding_starts = torch.arange(max(batch, tokens) + 1, dtype=torch.int32).clamp(max=tokens)
        self.fill({})
        self.copy_to_device()

    def fill(self, inputs: Mapping[str, Tensor]) -> None:
        """Stage a step, the rest as padding; all is padding without inputs."""
        tokens = len(inputs["token_ids"]) if inputs else 0
        count = len(inputs["seq_lens"]) if inputs else 0
        staged = self._staged
        for name in ("token_ids", "positions", "slot_mapping"):
            if tokens:
                staged[name][:tokens] = inputs[name]
        staged["token_ids"][tokens:], staged["positions"][tokens:] = 0, 0
        staged["slot_mapping"][tokens:], staged["seq_lens"][count:] = -1, 1
        rows = len(inputs["logit_rows"]) if inputs else 0
        starts = staged["query_start"]
        if count:
            staged["seq_lens"][:count] = inputs["seq_lens"]
            starts[:count] = inputs["query_start"][:count]
            staged["logit_rows"][:rows] = inputs["logit_rows"]
            table = inputs["block_table"]
            staged["block_table"][:count, : table.shape[1]] = table
        # A padding sequence has one padding token, or none when there are no more.
        left = self._padding_starts[tokens:][: len(starts) - count]
        starts[count : count + len(left)], starts[count + len(left) :] = left, self._padding_starts[-1]
        staged["logit_rows"][rows:] = 0
        staged["block_table"][count:, :1] = 0

    def copy_to_device(self) -> None:
        """Enqueue the copy of the staged inputs, which must not change until it is done."""
        self._device.copy_(self._host, non_blocking=True)
