"""Packed table codes back to numbers: tiles for the tensor cores, whole weights, single rows of an embedding.

The table of whole rows is read by `tl.load`: its 64 to 256 bytes stay in L1, where a warp's reads of one 128-byte line
are one access, and writing what is decoded takes longer than the lookup.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.bitpack import GROUP, LEVELS, TABLE_ROWS
from ...ops.coded_weight import CodedWeight
from ..launch import cdiv, launch

LEVELS_ = tl.constexpr(LEVELS)
_ROWS = 16
_GROUPS = 4  # of 64 weights


@triton.jit
def tile(
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    stored: tl.tensor,  # int64 [BN]: the rows
    group: tl.tensor,  # the first group of the tile
    num_groups: tl.tensor,
    BITS: tl.constexpr,
    BN: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Codes int32 [BN, GROUPS, GROUP] and group scales float32 [BN, GROUPS, 1], 0 past the last group."""
    # The smallest run of whole bytes that holds whole codes: 1 or 3 bytes of CODES codes.
    BYTES: tl.constexpr = 3 if BITS % 3 == 0 else 1
    CODES: tl.constexpr = BYTES * 8 // BITS
    RUNS: tl.constexpr = GROUP // CODES
    g = tl.arange(0, GROUPS) + group
    run = tl.arange(0, GROUPS * RUNS)
    inside = (run // RUNS + group < num_groups)[None]
    byte = codes_ptr + stored[:, None] * (num_groups * RUNS * BYTES) + ((run + group * RUNS) * BYTES)[None]
    bits = tl.load(byte, mask=inside, other=0).to(tl.int32)
    if BYTES == 3:
        bits |= tl.load(byte + 1, mask=inside, other=0).to(tl.int32) << 8
        bits |= tl.load(byte + 2, mask=inside, other=0).to(tl.int32) << 16
    code = (bits[:, :, None] >> (tl.arange(0, CODES) * BITS)[None, None, :]) & ((1 << BITS) - 1)
    scale = tl.load(scale_ptr + stored[:, None] * num_groups + g[None], mask=(g < num_groups)[None], other=0)
    return tl.reshape(code, [BN, GROUPS, GROUP]), scale.to(tl.float32)[:, :, None]


@triton.jit
def _decode(
    codes_ptr: tl.tensor,
    table_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    row_scale_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_groups: tl.tensor,
    BITS: tl.constexpr,
    TABLES: tl.constexpr,
    PICK: tl.constexpr,
    BN: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    kept = n < num_rows
    rows = tl.load(ids_ptr + n, mask=kept, other=0) if PICK else tl.minimum(n, num_rows - 1)
    stored = rows.to(tl.int64)
    group = tl.program_id(1) * GROUPS
    code, scale = tile(codes_ptr, scale_ptr, stored, group, num_groups, BITS, BN, GROUPS, GROUP)
    if TABLES > 0:
        code += (rows.to(tl.int32) // TABLES << BITS)[:, None, None]
    weight = tl.reshape(tl.load(table_ptr + code) * scale, [BN, GROUPS * GROUP])
    weight *= (tl.load(row_scale_ptr + stored).to(tl.float32) / LEVELS_)[:, None]
    k = group * GROUP + tl.arange(0, GROUPS * GROUP)
    at = n.to(tl.int64)[:, None] * (num_groups * GROUP) + k[None]
    mask = kept[:, None] & (k < num_groups * GROUP)[None]
    tl.store(out_ptr + at, weight.to(out_ptr.dtype.element_ty), mask=mask)


def pointers(weight: CodedWeight) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what kernels read: codes, table, scales of groups and of rows."""
    codes, table, scale, row_scale = weight.lut_tensors()
    return codes.contiguous(), table.float().contiguous(), scale.contiguous(), row_scale.contiguous()


def table_rows(weight: CodedWeight) -> int:
    """Return the rows of one table, 0 when there is one table."""
    return TABLE_ROWS if len(weight.lut_tensors()[1]) > 1 else 0


def decode(weight: CodedWeight, dtype: torch.dtype, ids: Tensor | None = None) -> Tensor:
    """Decode the weight [N, K] to `dtype`, or its rows `ids` [count], which must be in range."""
    count = weight.num_rows if ids is None else ids.shape[0]
    group, num_groups = weight.group, weight.scale.shape[1]
    groups = _GROUPS * GROUP // group
    out = weight.codes.new_empty((count, weight.columns), dtype=dtype)
    launch(
        _decode,
        (cdiv(count, _ROWS), cdiv(num_groups, groups)),
        *pointers(weight),
        weight.codes if ids is None else ids.contiguous(),
        out,
        count,
        num_groups,
        BITS=weight.bits,
        TABLES=table_rows(weight),
        PICK=ids is not None,
        BN=_ROWS,
        GROUPS=groups,
        GROUP=group,
        num_warps=4,
    )
    return out
