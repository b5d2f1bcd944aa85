"""The layout `lut` on the tensor cores, for tens of rows of x: codes stay packed, tiles are decoded on the way.

The product is transposed, `weight [BN, K] @ x.T [K, BM]`: the weight is the operand that may come from registers, and
the few rows of x are the side of the tile that may be narrow. Only the entries of the table are rounded to x's type;
group and row scales are float32 factors of the sums. The tables of a tile lie in shared memory: 32 entries of 16 bits
fill half of its banks, so that `tl.gather` has no conflicts there.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...ops.bitpack import GROUP, LEVELS
from ...ops.coded_weight import CodedWeight
from ..epilogue import finish
from ..launch import cdiv, launch
from ..split_columns import even_parts, gemm_rows, result_or_sums, split_of
from .lut_decode import LEVELS_, pointers, table_rows, tile

_BN = 64


@triton.jit
def _tiles(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    table_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    row_scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_out: tl.tensor,
    num_groups: tl.tensor,
    groups_each: tl.tensor,
    BITS: tl.constexpr,
    TABLES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    GROUP: tl.constexpr,
    LAST: tl.constexpr,
    BIAS: tl.constexpr,
) -> None:
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.minimum(n, num_out - 1)
    stored = rows.to(tl.int64)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    num_columns = num_groups * GROUP
    x_row = x_ptr + tl.minimum(m, num_rows - 1).to(tl.int64)[:, None] * num_columns
    begin = tl.program_id(2) * groups_each
    end = tl.minimum(begin + groups_each, num_groups)
    COUNT: tl.constexpr = BN // TABLES if TABLES else 1
    entry = tl.arange(0, COUNT << BITS)
    if TABLES > 0:
        entry = tl.minimum(entry + (tl.program_id(0) * COUNT << BITS), (tl.cdiv(num_out, TABLES) << BITS) - 1)
    tables = tl.load(table_ptr + entry).to(x_ptr.dtype.element_ty)
    acc = tl.zeros([BN, BM], tl.float32)
    for group in range(begin, end):
        code, _ = tile(codes_ptr, scale_ptr, stored, group, num_groups, BITS, BN, 1, GROUP)
        if TABLES > 0:
            code += (tl.arange(0, BN) // TABLES << BITS)[:, None, None]
        value = tl.reshape(tl.gather(tables, tl.reshape(code, [BN * GROUP]), 0), [BN, GROUP])
        x = tl.load(x_row + (tl.arange(0, GROUP) + group * GROUP)[None])
        scale = tl.load(scale_ptr + stored * num_groups + group).to(tl.float32)
        acc += tl.dot(value, tl.trans(x)) * scale[:, None]
    if LAST:
        acc *= (tl.load(row_scale_ptr + rows).to(tl.float32) / LEVELS_)[:, None]
        if BIAS:
            acc += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
    at = (tl.program_id(2) * num_rows + m[None]).to(tl.int64) * num_out + n[:, None]
    kept = (n < num_out)[:, None] & (m < num_rows)[None]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=kept)


def linear(x: Tensor, weight: CodedWeight, bias: Tensor | None = None, split: int | None = None) -> Tensor:
    """Multiply x [M, K] float16 or bfloat16: [M, N] in its dtype; the table is rounded to it, sums are float32."""
    num_rows, num_out = x.shape[0], weight.num_rows
    group, num_groups = weight.group, weight.scale.shape[1]
    tensors = pointers(weight)
    row_scale = tensors[3]
    block = gemm_rows(num_rows)
    grid = (cdiv(num_out, _BN), cdiv(num_rows, block))
    parts = split or split_of(grid[0] * grid[1], num_groups * group // (4 * GROUP), x.device, wanted=3)
    each, parts = even_parts(num_groups, parts)
    out = result_or_sums(x, num_rows, num_out, parts)
    launch(
        _tiles,
        (*grid, parts),
        x.contiguous(),
        *tensors,
        row_scale if bias is None else bias.contiguous(),
        out,
        num_rows,
        num_out,
        num_groups,
        each,
        BITS=weight.bits,
        TABLES=table_rows(weight),
        BM=block,
        BN=_BN,
        GROUP=group,
        LAST=parts == 1,
        BIAS=bias is not None,
        num_warps=4 if block < 64 else 8,
        num_stages=3,
    )
    return out if parts == 1 else finish(out, None, row_scale, bias, x.dtype, LEVELS)
