"""Packing of weights in the layout `groupwise` for this CPU, in the form that src/linear/groupwise_weight.h describes.

Codes and scales take the bits that their values need: integers of 2, 3, 5 or 6 bits lie in planes, of 5 or 6 bits
whether the weight holds them in a bit stream or in bytes, and so do scales and minima of 4 or 6 bits. Codes of up to 4
bits whose table has consecutive integers are computed with as integers, without looking them up. Other codes of 3 bits
in groups of 16, and all in groups of 32, lie in planes as well and are looked up where they are read.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import cpu
from ..ops.bitpack import GROUP, bits_of, unpack
from ..ops.coded_weight import FINE_GROUPS, GROUPWISE, SUPER, CodedWeight, row_blocks
from ..ops.linear_packed import rounded_table

_FLOAT8 = torch.float8_e4m3fn
_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8, _FLOAT8)  # in the order of `ScaleType`
_INT8, _INT6, _INT4 = 3, 5, 6
# Bits of a layout.
_BYTES, _TYPE, _MINIMUM, _STEPS, _HALVES, _INTEGERS, _ZERO, _INDICES = 32, 33, 36, 37, 38, 39, 42, 48
_LINE = 64
LEVELS = 127
PLANE_BITS = {32: 5, 16: 6}  # of the codes of a group of columns that may lie in planes
_SCALE_BITS = {32: (6, _INT6), 16: (4, _INT4)}


def groupwise_layout(weight: CodedWeight) -> int:
    """Return the layout of the packed form; raise `ValueError` for tensors that do not belong together."""
    weight.check()
    if weight.layout != GROUPWISE:
        raise ValueError(f"a weight in the layout {weight.layout}")
    codes, scale, table, minimum, super_scale, super_minimum = weight
    group = weight.group
    mixed = minimum is not None and minimum.dtype not in (scale.dtype, torch.int8)
    kind = 0 if mixed else _TYPES.index(scale.dtype)
    if kind == _INT8 and weight.columns % SUPER == 0 and group in _SCALE_BITS:
        bits, packed = _SCALE_BITS[group]
        if minimum is not None and _within(scale, 0, 2**bits) and _within(minimum, 0, 2**bits):
            kind = packed
    supers = [part for part in (super_scale, super_minimum) if part is not None]
    halves = kind >= _INT8 and kind != 4 and all(part.dtype == torch.float16 for part in supers)
    steps = minimum is not None and minimum.dtype == torch.int8 and scale.dtype != torch.int8
    flags = kind << _TYPE | (minimum is not None) << _MINIMUM | steps << _STEPS | halves << _HALVES
    return group | flags | _code_flags(codes, table, group)


def _within(values: Tensor, low: int, high: int) -> bool:
    """Tell if integers are in low..high - 1."""
    if not values.numel():
        return False
    least, most = values.aminmax()
    return int(least) >= low and int(most) < high


def _code_flags(codes: Tensor, table: Tensor | None, group: int) -> int:
    bits = PLANE_BITS.get(group, 0)
    if table is not None:
        zero, narrow, stored = _zero_of(table), bits_of(table) <= 4, bits_of(table)
        if stored == 3 and group in FINE_GROUPS and (group == 32 or zero is None):
            return 3 << _INTEGERS | 1 << _INDICES
        if zero is not None and (narrow or bits == stored):
            packed = 4 if narrow and (group == 32 or stored < 2) else stored
            return packed << _INTEGERS | zero << _ZERO
        return 0 if narrow else 1 << _BYTES
    for zero in (2 ** (bits - 1), 0) if bits else ():
        if _within(codes, -zero, 2**bits - zero):
            return bits << _INTEGERS | zero << _ZERO
    return 1 << _BYTES


def _zero_of(table: Tensor) -> int | None:
    """Return the zero point of a table of consecutive integers, `code - zero`; None for other tables."""
    values = table.float().flatten().cpu()
    zero = -int(values[0]) if bool(values[0].isfinite()) else -1
    return zero if 0 <= zero < 64 and torch.equal(values, torch.arange(len(values)) - float(zero)) else None


def record_bytes(layout: int, columns: int) -> int:
    """Return the bytes of the scales and minima of 16 rows."""
    kind, minimum, numbers = layout >> _TYPE & 7, layout >> _MINIMUM & 1, columns // (layout & 0xFFFFFFFF)
    supers = -(-columns // SUPER) * (2 if layout >> _HALVES & 1 else 4) * (1 + minimum)
    if kind in (_INT6, _INT4):
        wanted = supers + (numbers * 3 // 2 if kind == _INT6 else numbers)
    else:
        each = _TYPES[kind].itemsize
        least = (1 if layout >> _STEPS & 1 else each) if minimum else 0
        wanted = (supers if kind == _INT8 else 0) + numbers * (each + least)
    return -(-(_LINE + cpu.ROWS * wanted) // _LINE) * _LINE


def code_bytes(layout: int) -> int:
    """Return the bytes of the codes of 16 rows and 64 columns."""
    return cpu.ROWS * GROUP * code_bits(layout) // 8


def code_bits(layout: int) -> int:
    """Return the bits of a packed code: 2 to 6, or 8."""
    return 8 if layout >> _BYTES & 1 else (layout >> _INTEGERS & 7) or 4


def pack_groupwise(weight: CodedWeight, layout: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Pack a weight for the instruction set in use.

    `layout`: that of `groupwise_layout` for a weight of which these are some rows. Returns codes uint8 [blocks, K/64,
    bytes], scale uint8 [blocks, record] and table int8 [blocks, 16]. The code -128 becomes -127: not every instruction
    set can negate it.
    """
    layout = groupwise_layout(weight) if layout is None else layout
    codes, scale, table, minimum, super_scale, super_minimum = weight
    rows, columns, kind = weight.num_rows, weight.columns, layout >> _TYPE & 7
    packed, entries, unit = _packed_codes(weight, layout)
    unit = unit.expand(rows)[:, None]
    if kind == _TYPES.index(_FLOAT8) and super_scale is not None:
        unit = unit / super_scale
    parts = [_by_blocks(unit.contiguous())]
    if kind in (_INT8, _INT6, _INT4):
        half = torch.float16 if layout >> _HALVES & 1 else torch.float32
        parts += [
            _by_blocks(supers.to(half)) for supers in (super_scale, super_minimum) if supers is not None
        ]
    if kind in (_INT6, _INT4) and minimum is not None:
        parts.append(_packed_scales(scale, minimum, kind))
    else:
        numbers = [scale.to(_TYPES[kind])]
        if minimum is not None:
            numbers.append(minimum if layout >> _STEPS & 1 else minimum.to(_TYPES[kind]))
        sided = [_by_blocks(part).reshape(cpu.blocks(rows), scale.shape[1], -1) for part in numbers]
        parts.append(torch.cat(sided, 2).flatten(1))
    record = torch.cat(parts, 1)
    record = F.pad(record, (0, -record.shape[1] % _LINE))
    return packed.reshape(cpu.blocks(rows), columns // GROUP, -1), record, entries


def _packed_codes(weight: CodedWeight, layout: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed codes, tables of the blocks and the value of one code step, float32 [1]."""
    codes, table = weight.codes, weight.table
    rows, columns, bits = weight.num_rows, weight.columns, code_bits(layout)
    entries, unit = torch.zeros((cpu.blocks(rows), cpu.ROWS), dtype=torch.int8), torch.ones(1)
    if bits == 4 and table is not None:
        unused = torch.zeros((rows, columns // GROUP), dtype=torch.int8)
        packed, _, rounded, factor = cpu.pack_lut4(
            CodedWeight(codes, unused, table, super_scale=torch.ones(rows))
        )
        return (
            (packed, entries, unit) if layout >> _INTEGERS & 7 else (packed, rounded, factor[:1, 0] / LEVELS)
        )
    if bits != 8:
        zero = layout >> _ZERO & 63
        stored = (8, zero) if table is None else (bits_of(table), 0)
        if table is not None and layout >> _INDICES & 1:
            if _zero_of(table) is None:
                rounded, factor = rounded_table(table)
                entries[:, : rounded.shape[1]], unit = rounded, factor / LEVELS
            else:
                entries[:, : table.shape[1]] = table.to(torch.int8)
        return cpu.pack_planes(codes, *stored, bits, columns), entries, unit
    if table is not None:
        values, factor = rounded_table(table)
        blocks = (codes[start:stop] for start, stop in row_blocks(rows, columns))
        codes = torch.cat([values.flatten()[unpack(block, bits_of(table)).int()] for block in blocks])
        unit = factor / LEVELS
    packed = cpu.pack_int8(codes.clamp(min=-LEVELS), torch.ones(rows))[0]
    return packed.view(torch.uint8), entries, unit


def _packed_scales(scale: Tensor, minimum: Tensor, kind: int) -> Tensor:
    """Return scales and minima int8 [N, S] of 6 or 4 bits as bytes uint8 [blocks, bytes]: 256 columns by 256."""
    each = SUPER // (32 if kind == _INT6 else 16)
    scales, minima = (
        _by_blocks(part).reshape(cpu.blocks(len(scale)), -1, each * cpu.ROWS) for part in (scale, minimum)
    )
    nibbles = scales & 15 | (minima & 15) << 4
    if kind == _INT4:
        return nibbles.flatten(1)
    high = scales >> 4 | minima >> 4 << 2
    first, second = high.chunk(2, 2)
    return torch.cat([first | second << 4, nibbles], 2).flatten(1)


def _by_blocks(numbers: Tensor) -> Tensor:
    """Return numbers [N, S] as bytes uint8 [blocks, S * 16 * size], those of 16 rows side by side, 0 beyond N."""
    if numbers.dtype == _FLOAT8:
        numbers = numbers.view(torch.uint8)
    padded = F.pad(numbers, (0, 0, 0, -numbers.shape[0] % cpu.ROWS))
    sided = padded.reshape(-1, cpu.ROWS, numbers.shape[1]).transpose(1, 2).contiguous()
    return sided.view(torch.uint8).reshape(len(sided), -1)
