"""Operands of `linear_lut4_fragments`: which portable tensors each is made of, kept beside a compiled program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from ..ops import linear_lut4_fragments as fragments
from ..ops.bitpack import GROUP
from ..ops.coded_weight import CodedWeight

PARTS = ("codes", "table", "planes", "scale", "row_scale")


class FragmentLayer(msgspec.Struct, frozen=True):
    """The portable tensors of one layer: names of weights by part of `CodedWeight`, and of the bias."""

    names: dict[str, str]
    rows: int

    @property
    def bias(self) -> str | None:
        return self.names.get("bias")

    def weight(self, tensors: Mapping[str, Tensor]) -> CodedWeight:
        return CodedWeight.of({part: tensors[name] for part, name in self.names.items()})


class FragmentPacking(msgspec.Struct, frozen=True):
    """Operands `<name>_codes` and so on of one layer or of several with the same input, each in whole blocks of rows.

    `uniform`: every table is `step * (code - zero)`, which needs half of the instructions. `group`, `factors`,
    `minima`: columns of a group and the types of scales and minima in the layout `groupwise`, where it has them.
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
        given = [layer.weight(weights) for layer in packing.layers]
        parts = [fragments.pack(weight, packing.uniform) for weight in given]
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
        if packing.minima is not None:
            dtype = getattr(torch, packing.minima)
            minima = [found.to(dtype) for weight in given if (found := weight.minima()) is not None]
            made[f"{packing.name}_minimum"] = torch.cat([*map(fragments.pack_factors, minima)], 1)
    return made
