"""The layout `groupwise` on the tensor cores, for tens of rows of x: tiles are decoded on the way.

Weights are rounded to x's type, as the float model's are; sums are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...ops.coded_weight import CodedWeight
from ..epilogue import finish
from ..launch import cdiv, launch
from ..split_columns import even_parts, gemm_rows, result_or_sums, split_of
from .groupwise_decode import BK, decoded_tile, form, pointers

_BN = 64


@triton.jit
def _tiles(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    table_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    minimum_ptr: tl.tensor,
    super_scale_ptr: tl.tensor,
    super_minimum_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,  # the result [M, N], or float32 sums of each part [parts, M, N]
    num_rows: tl.tensor,
    num_out: tl.tensor,
    num_columns: tl.tensor,
    steps_each: tl.tensor,  # of BK columns, of a part
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    MINIMUM: tl.constexpr,
    SUPER_SCALE: tl.constexpr,
    SUPER_MINIMUM: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    LAST: tl.constexpr,
    BIAS: tl.constexpr,
) -> None:
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    stored = tl.minimum(n, num_out - 1).to(tl.int64)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    x_row = x_ptr + tl.minimum(m, num_rows - 1).to(tl.int64)[:, None] * num_columns
    begin = tl.program_id(2) * steps_each
    end = tl.minimum(begin + steps_each, tl.cdiv(num_columns, BK))
    acc = tl.zeros([BN, BM], tl.float32)
    for step in range(begin, end):
        weight = decoded_tile(
            codes_ptr, table_ptr, scale_ptr, minimum_ptr, super_scale_ptr, super_minimum_ptr, stored, step * BK,
            num_columns, BITS, GROUP, MINIMUM, SUPER_SCALE, SUPER_MINIMUM, BN, BK,
        )  # fmt: skip
        k = step * BK + tl.arange(0, BK)
        x = tl.load(x_row + k[None], mask=(k < num_columns)[None], other=0.0)
        acc = tl.dot(weight.to(x.dtype), tl.trans(x), acc)
    if LAST and BIAS:
        acc += tl.load(bias_ptr + stored).to(tl.float32)[:, None]
    at = (tl.program_id(2) * num_rows + m[None]).to(tl.int64) * num_out + n[:, None]
    kept = (n < num_out)[:, None] & (m < num_rows)[None]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=kept)


def linear(x: Tensor, weight: CodedWeight, bias: Tensor | None = None, split: int | None = None) -> Tensor:
    """Multiply x [M, K] float16 or bfloat16: [M, N] in its dtype; weights are rounded to it, sums are float32."""
    num_rows, num_out = x.shape[0], weight.num_rows
    block = gemm_rows(num_rows)
    grid, steps = (cdiv(num_out, _BN), cdiv(num_rows, block)), cdiv(weight.columns, BK)
    parts = split or split_of(grid[0] * grid[1], steps // 4, x.device, wanted=3)
    each, parts = even_parts(steps, parts)
    out = result_or_sums(x, num_rows, num_out, parts)
    launch(
        _tiles,
        (*grid, parts),
        x.contiguous(),
        *pointers(weight),
        weight.codes if bias is None else bias.contiguous(),
        out,
        num_rows,
        num_out,
        weight.columns,
        each,
        **form(weight),
        BM=block,
        BN=_BN,
        BK=BK,
        LAST=parts == 1,
        BIAS=bias is not None,
        num_warps=4 if block < 64 else 8,
        num_stages=3,
    )
    return out if parts == 1 else finish(out, None, None, bias, x.dtype)
