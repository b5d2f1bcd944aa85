"""Packing of groupwise codes for this CPU, in the layout that src/linear/groupwise_weight.h describes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import cpu
from ..ops.bitpack import GROUP
from ..ops.groupwise_codes import SUPER, group_columns, num_columns

GROUPWISE_OPERANDS = ("codes", "scale", "table", "minimum", "super_scale", "super_minimum")
_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)  # in the order of `ScaleType`
_BYTES, _TYPE, _MINIMUM = 32, 33, 36  # bits of a layout
_LINE = 64
LEVELS = 127


def groupwise_layout(
    codes: Tensor,
    scale: Tensor,
    table: Tensor | None = None,
    minimum: Tensor | None = None,
    super_scale: Tensor | None = None,
    super_minimum: Tensor | None = None,
) -> int:
    """Return the layout of the packed form of these tensors; raise `ValueError` for groups of other sizes."""
    dtype = _number_dtype(scale, minimum, super_scale)
    group = group_columns(codes, scale, table)
    flags = (table is None) << _BYTES | _TYPES.index(dtype) << _TYPE | (minimum is not None) << _MINIMUM
    return group | flags


def _number_dtype(scale: Tensor, minimum: Tensor | None, super_scale: Tensor | None) -> torch.dtype:
    if scale.dtype == torch.int8 and super_scale is None:
        return torch.float32
    same = minimum is None or minimum.dtype == scale.dtype
    return scale.dtype if same and scale.dtype in _TYPES else torch.float32


def record_bytes(layout: int, columns: int) -> int:
    """Return the bytes of the scales and minima of 16 rows."""
    dtype, kinds = _TYPES[layout >> _TYPE & 3], 1 + (layout >> _MINIMUM & 1)
    supers = -(-columns // SUPER) * _LINE * kinds if dtype == torch.int8 else 0
    numbers = columns // (layout & 0xFFFFFFFF) * cpu.ROWS * dtype.itemsize * kinds
    return -(-(_LINE + supers + numbers) // _LINE) * _LINE


def code_bytes(layout: int) -> int:
    """Return the bytes of the codes of 16 rows and 64 columns."""
    return cpu.ROWS * GROUP // (1 if layout >> _BYTES & 1 else 2)


def pack_groupwise(
    codes: Tensor,
    scale: Tensor,
    table: Tensor | None = None,
    minimum: Tensor | None = None,
    super_scale: Tensor | None = None,
    super_minimum: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Pack the tensors of `groupwise_codes` for the instruction set in use.

    Returns codes uint8 [blocks, K/64, bytes], scale uint8 [blocks, record] and table int8 [blocks, 16]. The code -128
    becomes -127: not every instruction set can negate it.
    """
    rows, columns = codes.shape[0], num_columns(codes, table)
    ones = torch.ones(rows)
    if table is None:
        packed = cpu.pack_int8(codes.clamp(min=-LEVELS), ones)[0].view(torch.uint8)
        entries, unit = torch.zeros((cpu.blocks(rows), cpu.ROWS), dtype=torch.int8), torch.ones(1)
    else:
        unused = torch.zeros((rows, columns // GROUP), dtype=torch.int8)
        packed, _, entries, factor = cpu.pack_lut4(codes, table, unused, ones)
        unit = factor[:1, 0] / LEVELS
    dtype = _number_dtype(scale, minimum, super_scale)
    parts = [_by_blocks(unit.expand(rows)[:, None].contiguous())]
    for supers in (super_scale, super_minimum):
        if supers is not None and dtype == torch.int8:
            parts.append(_by_blocks(supers.float()))
    for numbers in (scale, minimum):
        if numbers is not None:
            parts.append(_by_blocks(numbers.to(dtype)))
    record = torch.cat(parts, 1)
    record = F.pad(record, (0, -record.shape[1] % _LINE))
    return packed.reshape(cpu.blocks(rows), columns // GROUP, -1), record, entries


def _by_blocks(numbers: Tensor) -> Tensor:
    """Return numbers [N, S] as bytes uint8 [blocks, S * 16 * size], those of 16 rows side by side, 0 beyond N."""
    padded = F.pad(numbers, (0, 0, 0, -numbers.shape[0] % cpu.ROWS))
    sided = padded.reshape(-1, cpu.ROWS, numbers.shape[1]).transpose(1, 2).contiguous()
    return sided.view(torch.uint8).reshape(len(sided), -1)
