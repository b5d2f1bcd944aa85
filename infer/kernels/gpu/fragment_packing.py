"""Operands of `linear_lut4_fragments`: which portable tensors each is made of, kept beside a compiled program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from ..ops import linear_lut4_fragments as fragments
from ..ops.bitpack import GROUP

PARTS = ("codes", "table", "planes", "scale", "row_scale")


class FragmentLayer(msgspec.Struct, frozen=True):
    """The portable tensors of one layer, by the names of weights; of `linear_groupwise` without a row scale."""

    codes: str
    table: str
    scale: str
    row_scale: str | None
    bias: str | None
    rows: int
    minimum: str | None = None


class FragmentPacking(msgspec.Struct, frozen=True):
    """Operands `<name>_codes` and so on of one layer or of several with the same input, each in whole blocks of rows.

    `uniform`: every table is `step * (code - zero)`, which needs half of the instructions. `group`, `factors`,
    `minima`: columns of a group and the types of scales and minima of groupwise layers, where they have them.
    """

    name: str
    layers: tuple[FragmentLayer, ...]
    columns: int
    uniform: bool
    group: int = GROUP
    factors: str | None = None
    minima: str | None = None

    @property
    def starts(self) -> list[int]:
        """Return the first output feature of each layer, and where the next would start."""
        starts = [0]
        for layer in self.layers:
            starts.append(starts[-1] + -(-layer.rows // fragments.BLOCK) * fragments.BLOCK)
        return starts

    @property
    def out_features(self) -> int:
        return self.starts[-2] + self.layers[-1].rows

    @property
    def has_bias(self) -> bool:
        return any(layer.bias for layer in self.layers)

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each operand."""
        rows, units = self.starts[-1], -(-self.columns // fragments.UNIT)
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "codes": ((rows // 16, units * 4, 128), torch.int32),
            "table": ((rows // 32, 16), torch.float32),
            "planes": ((rows // 32, 18), torch.int32),
            "scale": ((units, rows, 4), torch.int8),
            "row_scale": ((rows,), torch.float32),
        }
        if self.factors is not None:
            found["scale"] = ((self.columns // self.group, rows), getattr(torch, self.factors))
        if self.minima is not None:
            found["minimum"] = ((self.columns // self.group, rows), getattr(torch, self.minima))
        if self.has_bias:
            found["bias"] = ((self.out_features,), torch.float32)
        return found


def pack(packings: Sequence[FragmentPacking], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the packed tensors by name, on the device of the portable `weights`."""
    made: dict[str, Tensor] = {}
    for packing in packings:
        parts = []
        for one in packing.layers:
            codes, table = weights[one.codes], weights[one.table]
            row_scale = None if one.row_scale is None else weights[one.row_scale]
            parts.append(fragments.pack(codes, table, weights[one.scale], row_scale, packing.uniform))
        for i, part in enumerate(PARTS):
            axis = 1 if part == "scale" else 0
            tensors = [layer[i] for layer in parts]
            made[f"{packing.name}_{part}"] = tensors[0] if len(tensors) == 1 else torch.cat(tensors, axis)
        if packing.has_bias:
            bias = torch.zeros(packing.out_features, device=parts[0][0].device)
            for start, layer in zip(packing.starts, packing.layers, strict=False):
                if layer.bias:
                    bias[start : start + layer.rows] = weights[layer.bias]
            made[f"{packing.name}_bias"] = bias
        minima = [fragments.pack_factors(_minima(one, weights)) for one in packing.layers if one.minimum]
        if minima:
            made[f"{packing.name}_minimum"] = torch.cat(minima, 1)
    return made


def _minima(layer: FragmentLayer, weights: Mapping[str, Tensor]) -> Tensor:
    """Return the minima of a layer as numbers: int8 ones are steps of the scales."""
    minimum, scale = weights[str(layer.minimum)], weights[layer.scale]
    return minimum * scale.float() if minimum.dtype == torch.int8 else minimum
