"""Fields of the blocks of GGUF types, joined into bytes uint8 [n, bytes]: the inverse of `load.gguf.block_fields`."""

from __future__ import annotations

import torch
from torch import Tensor


def half_bytes(values: Tensor) -> Tensor:
    """Return values [n, k], rounded to float16, as bytes [n, 2k]."""
    return values.to(torch.float16).contiguous().view(torch.uint8)


def join_nibbles(codes: Tensor) -> Tensor:
    """Join codes [n, 2k] into bytes [n, k]: the first half of the codes are the low halves."""
    low, high = codes.to(torch.uint8).chunk(2, 1)
    return (low & 15) | high << 4


def join_bits(bits: Tensor) -> Tensor:
    """Join bits [n, 8k] into bytes [n, k], lowest first."""
    return join_numbers(bits, 8, 1).to(torch.uint8)


def join_fields(codes: Tensor, width: int, bits: int, shifts: int) -> Tensor:
    """Join codes [n, k], `shifts` pieces of `width` codes after each other in the bits of the same bytes."""
    pieces = codes.to(torch.uint8).reshape(len(codes), -1, shifts, width)
    moved = pieces << (torch.arange(shifts, dtype=torch.uint8) * bits)[:, None]
    return moved.sum(2, dtype=torch.uint8).flatten(1)


def join_numbers(parts: Tensor, count: int, bits: int) -> Tensor:
    """Join each `count` integers of `bits` bits, of int [n, k * count], into int64 [n, k], lowest first."""
    grouped = parts.long().reshape(len(parts), -1, count)
    return (grouped << torch.arange(count) * bits).sum(2)


def to_bytes(numbers: Tensor, width: int) -> Tensor:
    """Return int64 [n, k] as little-endian bytes uint8 [n, k * width]; higher bits are dropped."""
    return (numbers[:, :, None] >> torch.arange(width) * 8 & 255).to(torch.uint8).flatten(1)
