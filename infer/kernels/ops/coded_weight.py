"""A weight as codes with scales: one value for what is quantized here and for what a checkpoint holds.

    codes          uint8 [N, K * bits / 8], packed as in `bitpack`, beside a table; or int8 [N, K] without one
    scale          [N, K / group]: a number for each group of columns
    table          float32 [T, 2**bits]: the values of the codes; or None
    minimum        [N, K / group]: added to the weights of a group; or None
    super_scale    by which scales are multiplied; or None
    super_minimum  by which minima are multiplied; or None
    weight[n, k] = value * (scale * super_scale) + minimum * super_minimum,  value = table[code] or code

Two layouts have kernels of their own. `super_scale` tells which a weight has: one number a row is `LUT`.

    lut            of the formats that quantize here; no minimum
      codes        of 2, 3, 4 or 6 bits
      scale        int8, signed, of 127 levels; a group is 64 columns, of 4-bit codes also 16, in rows of whole 64
      table        one, or one for each `TABLE_ROWS` rows (the last may have fewer)
      super_scale  float32 [N]: a scale is `scale * (super_scale / 127)`
    groupwise      of a quantized checkpoint, as it stores them; a group is 16, 32 or a multiple of 64 columns
      scale        float32, float16 or bfloat16; int8 or float8_e4m3fn beside a super_scale
      table        one of 2 to 6 bits, of 5 and 6 consecutive integers
      minimum      float, or int8 beside a super_minimum, as scale is; int8 without one: steps of a float scale (zero
                   points)
      super_scale  float32 or float16 [N, ceil(K / 256)], of the int8 scales of 256 columns; float32 [N, 1], by which
                   float8 scales are divided

The order of the products of a groupwise weight is that of the formats' own readers (llama.cpp, bitsandbytes, GPTQ, AWQ,
compressed-tensors), so that decoded weights are bit-equal to theirs in float32. The 8-bit scale of scales of the other
layout is the double quantization of QLoRA (Dettmers et al. 2023, section 3), here per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .bitpack import BITS, FINE, GROUP, LEVELS, TABLE_ROWS, bits_of, unpack

Layout = Literal["lut", "groupwise"]
LUT: Layout = "lut"
GROUPWISE: Layout = "groupwise"
SUPER = 256  # columns that share a super-scale
FINE_GROUPS = (16, 32)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# Weights decoded at a time: a large one (the output layer of a language model) goes in pieces.
BLOCK = 1 << 24
_BYTE = 8  # bits of a code without a table
_WIDTHS = (4, 8, 16, 32, 64)
Unpack = Callable[[Tensor, int], Tensor]


class CodedWeight(NamedTuple):
    """Tensors of one weight [N, K], in the order in which operators take them; an absent one is None."""

    codes: Tensor
    scale: Tensor
    table: Tensor | None = None
    minimum: Tensor | None = None
    super_scale: Tensor | None = None
    super_minimum: Tensor | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> CodedWeight:
        """Take the tensors by name; others stay out. Raises `KeyError` without codes or a scale."""
        return cls(tensors["codes"], tensors["scale"], *(tensors.get(name) for name in cls._fields[2:]))

    @property
    def layout(self) -> Layout:
        return LUT if self.super_scale is not None and self.super_scale.dim() == 1 else GROUPWISE

    @property
    def bits(self) -> int:
        """Bits of a code, from the width of the table."""
        return _BYTE if self.table is None else bits_of(self.table)

    @property
    def num_rows(self) -> int:
        return self.codes.shape[0]

    @property
    def columns(self) -> int:
        return self.codes.shape[1] * 8 // self.bits

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.columns // max(self.scale.shape[1], 1)

    @property
    def has_tables(self) -> bool:
        """True where rows have several tables."""
        return self.table is not None and len(self.table) > 1

    def table_of_rows(self) -> Tensor:
        """Return the table of each row, int32 [N]."""
        rows = torch.arange(self.num_rows, dtype=torch.int32, device=self.codes.device)
        return rows // TABLE_ROWS if self.has_tables else torch.zeros_like(rows)

    def check(self) -> None:
        """Raise `ValueError` unless this is a weight in its layout: what kernels compute with."""
        self.check_form()
        group, columns = self.group, self.columns
        if self.layout == LUT:
            fits = columns % GROUP == 0 and group in ((GROUP, FINE) if self.bits == 4 else (GROUP,))
        else:
            fits = group in FINE_GROUPS or group % GROUP == 0
        if not fits:
            what = f"{self.scale.shape[1]} scales for {columns} columns of {self.bits} bits"
            raise ValueError(f"{what}: no groups of the layout {self.layout}")

    def check_form(self) -> None:
        """Raise `ValueError` unless the tensors have dtypes and shapes that belong together: what is decoded."""
        wanted = torch.int8 if self.table is None else torch.uint8
        if self.codes.dtype != wanted or self.codes.dim() != 2:
            beside = "without" if self.table is None else "beside"
            raise ValueError(f"codes in {self.codes.dtype} {beside} a table")
        if self.layout == LUT:
            self._check_lut()
        else:
            self._check_groupwise()
        if self.group * self.scale.shape[1] != self.columns:
            raise ValueError(f"{self.scale.shape[1]} scales for {self.columns} columns")

    def _check_lut(self) -> None:
        codes, table, scale, supers = self.lut_tensors()
        rows, tables = len(codes), (1, -(-len(codes) // TABLE_ROWS))
        widths = [2**bits for bits in BITS]
        if table.dim() != 2 or table.shape[1] not in widths or len(table) not in tables:
            raise ValueError(f"a table {list(table.shape)} of {rows} rows")
        if scale.dtype != torch.int8 or scale.dim() != 2 or supers.dtype not in FLOATS or len(supers) != rows:
            what = f"scales {list(scale.shape)} in {scale.dtype}"
            raise ValueError(f"{what} beside super-scales {list(supers.shape)} in {supers.dtype}")
        if self.minimum is not None or self.super_minimum is not None:
            raise ValueError(f"a minimum in the layout {LUT}")

    def _check_groupwise(self) -> None:
        table, scale, minimum = self.table, self.scale, self.minimum
        if table is not None and not (
            table.dim() == 2 and len(table) == 1 and table.shape[1] in _WIDTHS and table.is_floating_point()
        ):
            raise ValueError(f"a table {list(table.shape)} in {table.dtype}")
        float8 = scale.dtype == torch.float8_e4m3fn
        supers = (1 if float8 else -(-self.columns // SUPER)) if float8 or scale.dtype == torch.int8 else 0
        _check_numbers("scale", scale, self.super_scale, supers)
        if minimum is None:
            return
        _check_numbers("minimum", minimum, self.super_minimum, supers if scale.dtype == torch.int8 else 0)
        both = scale.dtype in FLOATS and minimum.dtype in (*FLOATS, torch.int8)
        if minimum.shape != scale.shape or not (both or minimum.dtype == scale.dtype == torch.int8):
            raise ValueError(
                f"a minimum {list(minimum.shape)} in {minimum.dtype} beside a scale in {scale.dtype}"
            )

    def lut_tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return codes, table, scale and super-scale; raise `ValueError` for another layout than `LUT`."""
        if self.layout != LUT or self.table is None or self.super_scale is None:
            raise ValueError(f"a weight in the layout {self.layout}")
        return self.codes, self.table, self.scale, self.super_scale

    def steps(self) -> Tensor:
        """Return the scales, float32 [N, groups]."""
        return self._with_super(self.scale, self.super_scale)

    def minima(self) -> Tensor | None:
        """Return what is added to the weights of a group, float32 [N, groups]."""
        if self.minimum is None:
            return None
        if self.minimum.dtype == torch.int8 and self.super_minimum is None:
            return self.minimum.float() * self.steps()
        return self._with_super(self.minimum, self.super_minimum)

    def _with_super(self, values: Tensor, supers: Tensor | None) -> Tensor:
        if supers is None:
            return values.float()
        if supers.dim() == 1:
            return values.float() * (supers.float() / LEVELS)[:, None]
        if values.dtype == torch.float8_e4m3fn:
            return values.float() / supers
        each = supers.float().repeat_interleave(SUPER // max(self.group, 1), 1)
        return values.float() * each[:, : values.shape[1]]

    def part(self, start: int, stop: int) -> CodedWeight:
        """Return some rows; `start` is the first row of a table."""
        held = {name: tensor for name, tensor in self._asdict().items() if tensor is not None}
        return CodedWeight.of(rows_of(held, start, stop))

    def blocks(self) -> Iterator[CodedWeight]:
        """Yield the rows in pieces of at most `BLOCK` weights."""
        for start, stop in row_blocks(self.num_rows, self.columns):
            yield self.part(start, stop)

    def decode(self, unpacked: Unpack = unpack) -> Tensor:
        """Return the float32 weight [N, K]; raise `ValueError` for tensors that do not belong together."""
        self.check_form()
        return self._decode(self.table_of_rows() if self.has_tables else None, unpacked)

    def rows(self, ids: Tensor, unpacked: Unpack = unpack) -> Tensor:
        """Return the rows of `ids`, int [n], in float32 [n, K]: gathered first, decoded after."""
        self.check_form()
        owner = (ids // TABLE_ROWS).to(torch.int32) if self.has_tables else None
        numbers = (self.codes, self.scale, self.minimum, self.super_scale, self.super_minimum)
        codes, scale, *rest = (None if part is None else part.index_select(0, ids) for part in numbers)
        return CodedWeight(codes, scale, self.table, *rest)._decode(owner, unpacked)  # type: ignore[arg-type]

    def _decode(self, owner: Tensor | None, unpacked: Unpack) -> Tensor:
        """Decode; `owner` int32 [N]: the table of each row where there are several."""
        if self.table is None:
            values = self.codes.float()
        else:
            index = unpacked(self.codes, self.bits).to(torch.int32)
            if owner is not None:
                index = index + (owner * 2**self.bits)[:, None]
            values = self.table.float().reshape(-1).index_select(0, index.reshape(-1))
        columns, groups = self.columns, self.scale.shape[1]
        weight = values.reshape(self.num_rows, groups, columns // groups) * self.steps()[:, :, None]
        if (minima := self.minima()) is not None:
            weight = weight + minima[:, :, None]
        return weight.reshape(self.num_rows, columns)


def layout_of(tensors: Mapping[str, Tensor]) -> Layout | None:
    """Return the layout of a format's tensors; None of formats with one scale for a row, which are no `CodedWeight`."""
    if "scale" not in tensors or tensors["scale"].dim() != 2:
        return None
    return CodedWeight.of(tensors).layout


def rows_of(tensors: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    """Return some rows of tensors by name, with the tables of these rows; a single table stays whole."""
    found = {}
    for name, tensor in tensors.items():
        if name != "table":
            found[name] = tensor[start:stop]
        else:
            several = len(tensor) > 1
            found[name] = tensor[start // TABLE_ROWS : -(-stop // TABLE_ROWS)] if several else tensor
    return found


def row_blocks(num_rows: int, num_columns: int, most: int | None = None) -> list[tuple[int, int]]:
    """Return row ranges of at most `most` (`BLOCK`) weights, cut where a table ends."""
    rows = max((most or BLOCK) // max(num_columns, 1) // TABLE_ROWS, 1) * TABLE_ROWS
    return [(start, min(start + rows, num_rows)) for start in range(0, num_rows, rows)]


def _check_numbers(name: str, numbers: Tensor, supers: Tensor | None, count: int) -> None:
    known = numbers.dtype in (*FLOATS, torch.int8) or (numbers.dtype == torch.float8_e4m3fn and count == 1)
    bare = count == 0 and numbers.dtype == torch.int8 and name == "scale"
    if not known or numbers.dim() != 2 or bare or (supers is None) != (count == 0):
        beside = "without" if supers is None else "beside"
        raise ValueError(f"{name} in {numbers.dtype} {beside} super-scales")
    if supers is not None and (supers.dtype not in FLOATS or tuple(supers.shape[1:]) != (count,)):
        raise ValueError(
            f"super-scales {list(supers.shape)} in {supers.dtype} of the {name}, {count} expected"
        )
