"""Packed operands: which portable tensors each is made of, and how.

A `Packing` is kept beside the compiled form of a graph; `pack` makes its tensors when that form is opened, for the
instruction set at hand, so that artifacts hold weights once and run on any machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from .. import cpu
from ..ops import coded_weight
from ..ops.bitpack import GROUP
from ..ops.coded_weight import CodedWeight, rows_of
from ..ops.linear_int8 import row_step, to_grid
from .conv_weight_layout import ConvPacking, pack_conv
from .groupwise_layout import code_bytes, groupwise_layout, pack_groupwise, record_bytes
from .large_pages import LargePages

CODES = "codes"  # a `CodedWeight`, packed to LUT, GROUPWISE or INT8
LUT, INT8, BALANCED, WEIGHT, GROUPWISE = "lut4", "int8", "int8_balanced", "int8_weight", "groupwise"
PARTS = {
    LUT: ("codes", "scale", "table", "row_scale"),
    INT8: ("codes", "scale", "row_sum"),
    BALANCED: ("codes", "scale", "row_sum"),
    WEIGHT: ("codes", "scale"),
    GROUPWISE: ("codes", "scale", "table"),
}
WIDEST = 4  # bits of a code that one byte shuffle can look up; wider ones become int8


class Layer(msgspec.Struct, frozen=True):
    """The portable tensors of one layer: the names of weights by part."""

    names: dict[str, str]
    rows: int
    columns: int
    group: int = GROUP  # columns that share a scale of a table
    layout: int = 0  # of groupwise codes, see cpu/src/linear/groupwise_weight.h

    @property
    def bias(self) -> str | None:
        return self.names.get("bias")

    @property
    def x_scale(self) -> str | None:
        return self.names.get("x_scale")

    @property
    def x_multiplier(self) -> str | None:
        return self.names.get("x_multiplier")


def packed_from(kind: str, names: Mapping[str, str], tensors: Mapping[str, Tensor]) -> tuple[str, Layer]:
    """Return what a weight of `kind` is packed to, and its layer; `names`: weights of `tensors` by part.

    Tables of codes wider than `WIDEST` bits become int8.
    """
    rows, columns = tensors[names["codes"]].shape
    if kind != CODES:
        return kind, Layer(dict(names), rows, columns)
    weight = CodedWeight.of({part: tensors[name] for part, name in names.items()})
    layer = Layer(dict(names), rows, weight.columns)
    if weight.layout == coded_weight.GROUPWISE:
        return GROUPWISE, msgspec.structs.replace(layer, layout=groupwise_layout(weight))
    if weight.bits > WIDEST:
        return INT8, layer
    return LUT, msgspec.structs.replace(layer, group=weight.group)


def operand_shapes(kind: str, layer: Layer, count: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of each packed operand, of `count` blocks of rows."""
    columns = layer.columns
    if kind == LUT:
        return {
            "codes": ((count, columns // GROUP, cpu.ROWS * GROUP // 2), torch.uint8),
            "scale": ((count, columns // layer.group, cpu.ROWS), torch.int8),
            "table": ((count, cpu.ROWS), torch.int8),
            "row_scale": ((count, cpu.ROWS), torch.float32),
        }
    if kind == GROUPWISE:
        return {
            "codes": ((count, columns // GROUP, code_bytes(layer.layout)), torch.uint8),
            "scale": ((count, record_bytes(layer.layout, columns)), torch.uint8),
            "table": ((count, cpu.ROWS), torch.int8),
        }
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "codes": ((count, -(-columns // 4), cpu.ROWS, 4), torch.int8),
        "scale": ((count, cpu.ROWS), torch.float32),
        "row_sum": ((count, cpu.ROWS), torch.int32),
    }
    return {part: shapes[part] for part in PARTS[kind]}


def sizes(kind: str, layer: Layer, features: int) -> list[int]:
    """Return the integers that a packed operator takes after its tensors; `features`: rows of a result."""
    if kind == GROUPWISE:
        return [layer.layout, features]
    return [features] if kind == LUT else [features, layer.columns]


class Packing(msgspec.Struct, frozen=True, tag="linear"):
    """One packed operand set, `<name>_codes` and so on, of one layer or of several with the same input."""

    name: str
    kind: str
    layers: tuple[Layer, ...]

    @property
    def has_bias(self) -> bool:
        return any(layer.bias for layer in self.layers)

    @property
    def starts(self) -> list[int]:
        """Return the first output feature of each layer; each starts a new block."""
        starts = [0]
        for layer in self.layers[:-1]:
            starts.append(starts[-1] + cpu.blocks(layer.rows) * cpu.ROWS)
        return starts

    @property
    def out_features(self) -> int:
        return self.starts[-1] + self.layers[-1].rows


class ExpertsPacking(msgspec.Struct, frozen=True, tag="experts"):
    """Packed operand set of a layer of experts with `features` rows each: their blocks follow each other."""

    name: str
    kind: str
    layer: Layer
    features: int

    @property
    def num_experts(self) -> int:
        return self.layer.rows // self.features

    def of_expert(self, expert: int, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the portable tensors of one expert by the names of all; a shared table stays whole."""
        held = {part: weights[name] for part, name in self.layer.names.items()}
        rows = rows_of(held, expert * self.features, (expert + 1) * self.features)
        return {self.layer.names[part]: tensor for part, tensor in rows.items()}


AnyPacking = Packing | ConvPacking | ExpertsPacking


def pack(packings: Sequence[AnyPacking], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the packed tensors by name; `weights` holds the portable ones, on the CPU."""
    made: dict[str, Tensor] = {}
    memory = LargePages()
    for packing in packings:
        if isinstance(packing, ConvPacking):
            made |= pack_conv(packing, weights)
            continue
        if isinstance(packing, ExpertsPacking):
            each = (packing.of_expert(e, weights) for e in range(packing.num_experts))
            parts = [pack_layer(packing.kind, packing.layer, own) for own in each]
        else:
            parts = [pack_layer(packing.kind, layer, weights) for layer in packing.layers]
        for i, part in enumerate(PARTS[packing.kind]):
            made[f"{packing.name}_{part}"] = memory.keep([p[i] for p in parts])
        if isinstance(packing, Packing):
            made |= pack_vectors(packing, weights)
    return made


def pack_vectors(packing: Packing, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the packed tensors that are no weights: bias, step and multiplier of the input, where present."""
    made = {}
    if (multiplier := packing.layers[0].x_multiplier) is not None:
        made[f"{packing.name}_x_multiplier"] = weights[multiplier].float()
    if (step := packing.layers[0].x_scale) is not None:
        made[f"{packing.name}_x_scale"] = weights[step].float().reshape(1)
    if packing.has_bias:
        bias = torch.zeros(packing.out_features)
        for start, layer in zip(packing.starts, packing.layers, strict=True):
            if layer.bias:
                bias[start : start + layer.rows] = weights[layer.bias]
        made[f"{packing.name}_bias"] = bias
    return made


def pack_layer(kind: str, layer: Layer, weights: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Return the packed tensors of one layer, in the order of `PARTS[kind]`."""
    held = {part: weights[name] for part, name in layer.names.items()}
    if kind == GROUPWISE:
        return pack_groupwise(CodedWeight.of(held), layer.layout)
    if kind == LUT:
        return cpu.pack_lut4(CodedWeight.of(held))
    codes, scale = as_int8(CodedWeight.of(held)) if "table" in held else (held["codes"], held["scale"])
    return cpu.pack_int8(codes, scale)[: len(PARTS[kind])]


def as_int8(weight: CodedWeight) -> tuple[Tensor, Tensor]:
    """Return int8 codes [N, K] and a scale [N], for codes too wide to be looked up in registers.

    One scale for each row adds about 0.8 % of error to the weights, where 6-bit codes have 2.4 %.
    """
    parts = []
    for block in weight.blocks():
        values = block.decode()
        step = row_step(values)
        parts.append((to_grid(values, step).to(torch.int8), step.squeeze(1)))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
