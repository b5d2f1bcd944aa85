"""`linear_lut` on a GPU: choice among three kernels by the number of rows of x.

    few rows     warp shuffles, limited by reading the codes                      `lut_gemv`
    tens         tensor-core tiles, decoded on the way (float16 and bfloat16)     `lut_gemm`
    many         the weight decoded to x's type once, then cuBLAS                 `lut_decode`

The row counts between them are in `kernel_thresholds`. Weights are exact in the first; the others round to x's type the
table or the weight, as the float model's own weights are rounded. float32 stays float32 everywhere.
"""

from __future__ import annotations

from torch import Tensor

from ...ops.bitpack import TABLE_ROWS, bits_of
from .. import kernel_thresholds
from ..decoded_linear import decoded_linear
from ..launch import HALVES, flat_rows, same_device
from . import lut_gemm, lut_gemv
from .lut_decode import decode


def linear_lut(
    x: Tensor, codes: Tensor, table: Tensor, scale: Tensor, row_scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`infer::linear_lut` on CUDA tensors: x [..., K] → [..., N] in x's dtype."""
    same_device(x, codes, table, scale, row_scale, bias)
    rows, bits = flat_rows(x), bits_of(table)
    limit = kernel_thresholds.of(f"lut{bits}", x.device)
    half = rows.dtype in HALVES
    if rows.shape[0] < (limit.tiles if half else 2 * lut_gemv.MAX_ROWS + 1):
        y = lut_gemv.linear(rows, codes, table, scale, row_scale, bias)
    elif half and rows.shape[0] < limit.library:
        y = lut_gemm.linear(rows, codes, table, scale, row_scale, bias)
    else:
        y = multiply_decoded(rows, codes, table, scale, row_scale, bias)
    return y.to(x.dtype).reshape(*x.shape[:-1], codes.shape[0])


def multiply_decoded(
    x: Tensor, codes: Tensor, table: Tensor, scale: Tensor, row_scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Multiply x [M, K] by the weight decoded to x's dtype."""

    def rows(start: int, stop: int) -> Tensor:
        part = slice(start, stop)
        tables = table if table.shape[0] == 1 else table[start // TABLE_ROWS : -(-stop // TABLE_ROWS)]
        return decode(codes[part], tables, scale[part], row_scale[part], x.dtype)

    return decoded_linear(x, codes.shape[0], rows, bias, multiple=TABLE_ROWS)
