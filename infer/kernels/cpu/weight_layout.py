"""Packed operands: which portable tensors each is made of, and how.

A `Packing` is kept beside the compiled form of a graph; `pack` makes its tensors when that form is opened, for the
instruction set at hand, so that artifacts hold weights once and run on any machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from .. import cpu
from ..ops.bitpack import GROUP, TABLE_ROWS, bits_of, columns_of, decode, group_of, tables_of_rows
from ..ops.groupwise_codes import num_columns
from ..ops.linear_int8 import row_step, to_grid
from ..ops.linear_lut import row_blocks
from .conv_weight_layout import ConvPacking, pack_conv
from .groupwise_layout import GROUPWISE_OPERANDS, code_bytes, groupwise_layout, pack_groupwise, record_bytes
from .large_pages import LargePages

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
    """The portable tensors of one layer, by the names of weights."""

    codes: str
    scale: str
    rows: int
    columns: int
    table: str | None = None
    row_scale: str | None = None
    x_scale: str | None = None
    x_multiplier: str | None = None
    bias: str | None = None
    group: int = GROUP  # columns that share a scale of a table
    minimum: str | None = None
    super_scale: str | None = None
    super_minimum: str | None = None
    layout: int = 0  # of groupwise codes, see cpu/src/linear/groupwise_weight.h


def packed_from(kind: str, names: Mapping[str, str], tensors: Mapping[str, Tensor]) -> tuple[str, Layer]:
    """Return what a weight of `kind` is packed to, and its layer; `names`: weights of `tensors` by part.

    Tables of codes wider than `WIDEST` bits become int8.
    """
    codes = tensors[names["codes"]]
    parts: dict[str, Any] = {**names, "rows": codes.shape[0], "columns": codes.shape[1]}
    layer = Layer(**parts)
    if kind == GROUPWISE:
        held = {name: tensors[stored] for name, stored in names.items() if name != "bias"}
        layout = groupwise_layout(**held)
        return kind, msgspec.structs.replace(
            layer, columns=num_columns(codes, held.get("table")), layout=layout
        )
    if kind != LUT:
        return kind, layer
    table, scale = tensors[names["table"]], tensors[names["scale"]]
    layer = msgspec.structs.replace(layer, columns=columns_of(codes, table))
    if bits_of(table) > WIDEST:
        return INT8, layer
    return kind, msgspec.structs.replace(layer, group=group_of(codes, table, scale))


def groupwise_shapes(blocks: int, layer: Layer) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shapes and dtypes of the packed operands of groupwise codes."""
    return {
        "codes": ((blocks, layer.columns // GROUP, code_bytes(layer.layout)), torch.uint8),
        "scale": ((blocks, record_bytes(layer.layout, layer.columns)), torch.uint8),
        "table": ((blocks, cpu.ROWS), torch.int8),
    }


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
        rows = slice(expert * self.features, (expert + 1) * self.features)
        tables = slice(rows.start // TABLE_ROWS, rows.stop // TABLE_ROWS)
        layer = self.layer
        named = (
            layer.codes,
            layer.scale,
            layer.row_scale,
            layer.minimum,
            layer.super_scale,
            layer.super_minimum,
        )
        found = {name: weights[name][rows] for name in named if name is not None}
        if (table := self.layer.table) is not None:
            found[table] = weights[table] if len(weights[table]) == 1 else weights[table][tables]
        return found


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
    if kind == GROUPWISE:
        names = {name: getattr(layer, name) for name in GROUPWISE_OPERANDS}
        held = {name: weights[stored] for name, stored in names.items() if stored is not None}
        return pack_groupwise(**held, layout=layer.layout)
    if kind == LUT:
        lut = (layer.codes, layer.table, layer.scale, layer.row_scale)
        return cpu.pack_lut4(*(weights[str(name)] for name in lut))
    codes, scale = weights[layer.codes], weights[layer.scale]
    if layer.table is not None:
        codes, scale = as_int8(codes, weights[layer.table], scale, weights[str(layer.row_scale)])
    return cpu.pack_int8(codes, scale)[: len(PARTS[kind])]


def as_int8(codes: Tensor, table: Tensor, scale: Tensor, row_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Tensors of `bitpack` → int8 codes [N, K] and a scale [N]: for codes too wide to be looked up in registers.

    One scale for each row adds about 0.8 % of error to the weights, where 6-bit codes have 2.4 %.
    """
    parts = []
    for start, stop in row_blocks(codes.shape[0], columns_of(codes, table)):
        block = slice(start, stop)
        tables = tables_of_rows(stop - start, table, start)
        weight = decode(codes[block], table, scale[block], row_scale[block], tables)
        step = row_step(weight)
        parts.append((to_grid(weight, step).to(torch.int8), step.squeeze(1)))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
