"""`linear_groupwise` on a GPU: choice among three kernels by the number of rows of x.

    few rows     in registers, limited by reading the codes                         `groupwise_gemv`
    tens         tensor-core tiles, decoded on the way (float16 and bfloat16)       here
    many         the weight decoded to x's type once, then cuBLAS                   `groupwise_decode`

Weights are exact in the first and for float32; in the others they are rounded to x's type, as the float model's are.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...ops.linear_groupwise import rows_of
from .. import kernel_thresholds
from ..decoded_linear import decoded_linear
from ..epilogue import finish
from ..launch import HALVES, cdiv, flat_rows, launch, same_device
from ..split_columns import even_parts, gemm_rows, result_or_sums, split_of
from . import groupwise_gemv
from .groupwise_decode import BK, Operands, decode, decoded_tile

_BN = 64
_MEASURED = {2: 2, 3: 3, 4: 4}  # bits of codes whose thresholds are known; others have those of 6


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


def tiles(x: Tensor, operands: Operands, bias: Tensor | None = None, split: int | None = None) -> Tensor:
    """Multiply x [M, K] float16 or bfloat16: [M, N] in its dtype; weights are rounded to it, sums are float32."""
    num_rows, num_out = x.shape[0], operands.codes.shape[0]
    block = gemm_rows(num_rows)
    grid, steps = (cdiv(num_out, _BN), cdiv(num_rows, block)), cdiv(operands.columns, BK)
    parts = split or split_of(grid[0] * grid[1], steps // 4, x.device, wanted=3)
    each, parts = even_parts(steps, parts)
    out = result_or_sums(x, num_rows, num_out, parts)
    launch(
        _tiles,
        (*grid, parts),
        x.contiguous(),
        *operands.pointers,
        operands.codes if bias is None else bias.contiguous(),
        out,
        num_rows,
        num_out,
        operands.columns,
        each,
        **operands.form,
        BM=block,
        BN=_BN,
        BK=BK,
        LAST=parts == 1,
        BIAS=bias is not None,
        num_warps=4 if block < 64 else 8,
        num_stages=3,
    )
    return out if parts == 1 else finish(out, None, None, bias, x.dtype)


def multiply_decoded(x: Tensor, operands: Operands, bias: Tensor | None = None) -> Tensor:
    """Multiply x [M, K] by the weight decoded to x's dtype."""

    def rows(start: int, stop: int) -> Tensor:
        return decode(Operands(*rows_of(operands, start, stop)), x.dtype)  # type: ignore[arg-type]

    return decoded_linear(x, operands.codes.shape[0], rows, bias)


def linear_groupwise(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    table: Tensor | None,
    minimum: Tensor | None,
    super_scale: Tensor | None,
    super_minimum: Tensor | None,
    bias: Tensor | None = None,
) -> Tensor:
    """`infer::linear_groupwise` on CUDA tensors: x [..., K] → [..., N] in x's dtype."""
    operands = Operands(codes, scale, table, minimum, super_scale, super_minimum)
    same_device(x, *operands, bias)
    rows = flat_rows(x)
    limit = kernel_thresholds.of(f"lut{_MEASURED.get(operands.bits, 6)}", x.device)
    half = rows.dtype in HALVES
    few = limit.tiles if half else 2 * groupwise_gemv.MAX_ROWS + 1
    if rows.shape[0] < few and groupwise_gemv.usable(operands):
        y = groupwise_gemv.linear(rows, operands, bias)
    elif half and rows.shape[0] < limit.library:
        y = tiles(rows, operands, bias)
    else:
        y = multiply_decoded(rows, operands, bias)
    return y.to(x.dtype).reshape(*x.shape[:-1], codes.shape[0])
