"""`linear_codes` on a GPU: choice among three kernels by the number of rows of x.

    few rows     in registers, limited by reading the codes                       `lut_gemv`, `groupwise_gemv`
    tens         tensor-core tiles, decoded on the way (float16 and bfloat16)     `lut_gemm`, `groupwise_gemm`
    many         the weight decoded to x's type once, then cuBLAS                 `lut_decode`, `groupwise_decode`

The row counts between them are in `kernel_thresholds`. Weights are exact in the first; the others round to x's type the
table or the weight, as the float model's own weights are rounded. float32 stays float32 everywhere.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ..ops.bitpack import TABLE_ROWS
from ..ops.coded_weight import LUT, CodedWeight
from . import gemv_tiles, kernel_thresholds
from .groupwise import groupwise_decode, groupwise_gemm, groupwise_gemv
from .launch import HALVES, flat_rows, same_device
from .lut import lut_decode, lut_gemm, lut_gemv

MOST_WEIGHTS = 1 << 27  # decoded at once: larger weights are decoded in pieces, so that the copy stays small
_MEASURED = {2: 2, 3: 3, 4: 4}  # bits of codes whose thresholds are known; others have those of 6


def linear_codes(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    table: Tensor | None,
    minimum: Tensor | None,
    super_scale: Tensor | None,
    super_minimum: Tensor | None,
    bias: Tensor | None = None,
) -> Tensor:
    """`infer::linear_codes` on CUDA tensors: x [..., K] → [..., N] in x's dtype."""
    weight = CodedWeight(codes, scale, table, minimum, super_scale, super_minimum)
    same_device(x, *weight, bias)
    rows, is_lut = flat_rows(x), weight.layout == LUT
    limit = kernel_thresholds.of(f"lut{_MEASURED.get(weight.bits, 6)}", x.device)
    half = rows.dtype in HALVES
    few = limit.tiles if half else 2 * gemv_tiles.MAX_ROWS + 1
    if rows.shape[0] < few and gemv_tiles.usable(weight):
        y = (lut_gemv if is_lut else groupwise_gemv).linear(rows, weight, bias)
    elif half and rows.shape[0] < limit.library:
        y = (lut_gemm if is_lut else groupwise_gemm).linear(rows, weight, bias)
    else:
        y = multiply_decoded(rows, weight, bias)
    return y.to(x.dtype).reshape(*x.shape[:-1], weight.num_rows)


def multiply_decoded(x: Tensor, weight: CodedWeight, bias: Tensor | None = None) -> Tensor:
    """Multiply x [M, K] by the weight decoded to x's dtype: [M, N] in x's dtype."""
    is_lut, num_out = weight.layout == LUT, weight.num_rows
    decode = lut_decode.decode if is_lut else groupwise_decode.decode
    multiple = TABLE_ROWS if is_lut else 1  # of rows that begin a piece
    height = max(MOST_WEIGHTS // max(x.shape[1], 1) // multiple, 1) * multiple
    added = None if bias is None else bias.to(x.dtype)
    if height >= num_out:
        return F.linear(x, decode(weight, x.dtype), added)
    y = x.new_empty((x.shape[0], num_out))
    for start in range(0, num_out, height):
        part = slice(start, min(start + height, num_out))
        rows = decode(weight.part(part.start, part.stop), x.dtype)
        y[:, part] = F.linear(x, rows, None if added is None else added[part])
    return y
