"""Products with int8 codes on the tensor cores: int8 by int8 to exact int32, or float by codes to float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..epilogue import finish
from ..launch import cdiv, launch
from ..split_columns import even_parts, gemm_rows, split_of

_BN = 64
_BK = 128
_BK_FLOAT = 64


@triton.jit
def _tiles(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    out_ptr: tl.tensor,  # [parts, M, N], int32 or float32
    num_rows: tl.tensor,
    num_out: tl.tensor,
    num_columns: tl.tensor,
    columns_each: tl.tensor,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    x_row = x_ptr + tl.minimum(m, num_rows - 1).to(tl.int64)[:, None] * num_columns
    codes_row = codes_ptr + tl.minimum(n, num_out - 1).to(tl.int64)[:, None] * num_columns
    begin = tl.program_id(2) * columns_each
    end = tl.minimum(begin + columns_each, num_columns)
    acc = tl.zeros([BN, BM], out_ptr.dtype.element_ty)
    for start in range(begin, end, BK):
        k = (tl.arange(0, BK) + start)[None]
        x = tl.load(x_row + k, mask=k < end, other=0)
        codes = tl.load(codes_row + k, mask=k < end, other=0).to(x.dtype)
        acc = tl.dot(codes, tl.trans(x), acc, input_precision=PRECISION, out_dtype=out_ptr.dtype.element_ty)
    at = (tl.program_id(2) * num_rows + m[None]).to(tl.int64) * num_out + n[:, None]
    tl.store(out_ptr + at, acc, mask=(n < num_out)[:, None] & (m < num_rows)[None])


def products(q: Tensor, codes: Tensor, split: int | None = None) -> Tensor:
    """Multiply q int8 [M, K] by codes int8 [N, K]: sums int32 [parts, M, N], to be added over parts."""
    return _launch(q, codes, torch.int32, _BK, split)


def weight_only(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None, split: int | None = None
) -> Tensor:
    """Multiply x [M, K] float by codes int8 [N, K] and scale [N]: [M, N] in x's dtype.

    float32 x is multiplied in full precision.
    """
    return finish(_launch(x, codes, torch.float32, _BK_FLOAT, split), None, scale, bias, x.dtype)


def _launch(x: Tensor, codes: Tensor, sums: torch.dtype, block_columns: int, split: int | None) -> Tensor:
    (num_rows, num_columns), num_out = x.shape, codes.shape[0]
    # float32: no tensor cores, so the tile's size is bounded by registers
    block = gemm_rows(num_rows, 32 if x.dtype == torch.float32 else 128)
    grid = (cdiv(num_out, _BN), cdiv(num_rows, block))
    parts = split or split_of(grid[0] * grid[1], cdiv(num_columns, 4 * block_columns), x.device, wanted=3)
    each, parts = even_parts(num_columns, parts, block_columns)
    out = x.new_empty((parts, num_rows, num_out), dtype=sums)
    launch(
        _tiles,
        (*grid, parts),
        x.contiguous(),
        codes.contiguous(),
        out,
        num_rows,
        num_out,
        num_columns,
        each,
        BM=block,
        BN=_BN,
        BK=block_columns,
        PRECISION="ieee",
        num_warps=4 if block < 64 else 8,
        num_stages=3,
    )
    return out
