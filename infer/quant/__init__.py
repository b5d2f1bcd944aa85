"""Ways to shrink a weight: one file each, its name the name after `--quant` (`int8`, `nf4`, `cluster`).

A quantizer is a module with the functions of `Quantizer`. Every format works row by row, so that a weight can be
quantized in blocks of rows and one tensor at most is in float at a time. What it makes is a dict of tensors plus the
`infer::` op that computes with them; `quantize_model` walks a model and swaps its layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from ..spec import Plan


class Stats(Protocol):
    """What calibration saw of one layer's input."""

    absmax: Tensor  # scalar, float32
    square_mean: Tensor  # [in_features or in_channels], float32: the mean of x² per input column
    num_rows: int


class Quantizer(Protocol):
    OPTIONS: tuple[str, ...]  # what may follow the colon; "" is the default

    def missing(self) -> str | None:
        """Why this machine can't use it, or None."""
        ...

    def refuses(self, layer: nn.Module, plan: Plan) -> str | None:
        """Why this layer stays float, or None. Layers are Linear, Embedding, Conv2d; others are never asked."""
        ...

    def quantize(self, weight: Tensor, stats: Stats | None, plan: Plan) -> dict[str, Tensor]:
        """weight float [rows, …] → packed tensors. Row-wise: quantizing blocks of `ROWS` rows and concatenating is equal."""
        ...

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The float32 weight that the packed tensors stand for."""
        ...

    def linear(self, x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
        """`F.linear` on the packed weight, by one `torch.ops.infer` op."""
        ...


def bits_per_weight(tensors: Mapping[str, Tensor], num_weights: int) -> float:
    """Bits stored per quantized weight, tables and scales included."""
    return sum(t.numel() * t.element_size() for t in tensors.values()) * 8 / max(num_weights, 1)


__all__ = ["Quantizer", "Stats", "bits_per_weight", "torch"]
