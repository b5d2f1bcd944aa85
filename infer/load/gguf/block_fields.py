"""Fields of the blocks of GGUF types, unpacked from bytes uint8 [n, bytes]."""

from __future__ import annotations

import torch
from torch import Tensor


def half(raw: Tensor) -> Tensor:
    """View uint8 [n, 2k] as float16 [n, k]."""
    return raw.contiguous().view(torch.float16)


def nibbles(raw: Tensor) -> Tensor:
    """Split uint8 [n, k] into codes [n, 2k]: the low halves of all bytes, then the high ones."""
    return torch.cat([raw & 15, raw >> 4], 1)


def bits(raw: Tensor) -> Tensor:
    """Unpack uint8 [n, k] to bits [n, 8k], lowest first."""
    return (raw[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)


def fields(raw: Tensor, shifts: tuple[int, ...], mask: int, width: int) -> Tensor:
    """Return pieces of `width` bytes of `raw` [n, k], each once for every shift: [n, k / width * shifts, width]."""
    shifted = raw.reshape(len(raw), -1, 1, width) >> torch.tensor(shifts, dtype=torch.uint8)[:, None]
    return (shifted & mask).reshape(len(raw), -1, width)


def integers(raw: Tensor, width: int) -> Tensor:
    """Join uint8 [n, k * width] into little-endian integers, int64 [n, k]."""
    weights = torch.tensor([1 << 8 * place for place in range(width)])
    return (raw.reshape(len(raw), -1, width).long() * weights).sum(2)


def pieces(numbers: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """Return the bits of `mask` of integers [n, k] after each shift, side by side: int64 [n, k * shifts]."""
    return (numbers.long()[:, :, None] >> torch.tensor(shifts) & mask).flatten(1)
