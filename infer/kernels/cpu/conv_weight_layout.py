"""Packed operands of a fused convolution: which portable tensors they are made of, and how."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.conv2d_packed import BLOCK, pack

PARTS = ("weight", "start", "multiplier", "offset")


class ConvPacking(msgspec.Struct, frozen=True, tag="conv"):
    """`<name>_weight`, `_start`, `_multiplier`, `_offset` of one convolution between grids of known steps.

    The grids of the input (`x_step`, `x_zero`) and of the result (`out_step` 1 and `out_zero` 0 for floats) are folded
    into multiplier and offset; so is `shift`, in steps of the result, which takes away a residual's zero.
    """

    name: str
    codes: str
    scale: str
    bias: str | None
    stored: int  # channels of the input image
    x_step: float
    x_zero: int
    out_step: float = 1.0
    out_zero: int = 0
    shift: float = 0.0

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(f"{self.name}_{part}" for part in PARTS)

    def shapes(self, codes: Tensor) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each part."""
        blocks = -(-codes.shape[0] // BLOCK)
        quads = self.stored * codes.shape[2] * codes.shape[3] // 4
        rows = (blocks * BLOCK,)
        return [
            ((blocks, quads, BLOCK, 4), torch.int8),
            (rows, torch.int32),
            (rows, torch.float32),
            (rows, torch.float32),
        ]


def pack_conv(packing: ConvPacking, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the packed tensors by name, computed in float64 up to the rounding of multiplier and offset."""
    weight, start = pack(weights[packing.codes], packing.x_zero, packing.stored)
    scale = weights[packing.scale].double()
    multiplier = scale * (packing.x_step / packing.out_step)
    offset = torch.zeros_like(scale) if packing.bias is None else weights[packing.bias].double()
    offset = offset / packing.out_step + (packing.out_zero + packing.shift)
    padding = (0, len(start) - len(scale))
    made = (weight, start, *(F.pad(each.float(), padding) for each in (multiplier, offset)))
    return dict(zip(packing.parts, made, strict=True))
