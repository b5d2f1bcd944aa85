"""`linear_lut4_fragments` on a GPU: choice between two kernels by the number of rows of x.

    up to 64, or more while reading the weight is the limit    decoded in registers    `fragment_gemm`
    many                                                       decoded once, cuBLAS    here

float32 x takes the portable operator's weight. Entries of the table are rounded to x's type first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from ...ops.bitpack import GROUP, LEVELS
from ...ops.linear_lut4_fragments import weight_of
from .. import kernel_thresholds
from ..int8.int8_gemv import INTERPRETED
from ..launch import HALVES, cdiv, flat_rows, launch, same_device
from . import fragment_gemm
from .fragment_decode import decode, planes_of

_LEVELS = tl.constexpr(LEVELS)


@triton.jit
def _decode(
    codes_ptr: tl.tensor,
    planes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    minimum_ptr: tl.tensor,
    row_scale_ptr: tl.tensor,
    out_ptr: tl.tensor,  # [N, K]
    num_out: tl.tensor,
    padded: tl.tensor,
    num_columns: tl.tensor,
    groups: tl.tensor,
    BN: tl.constexpr,
    UNIFORM: tl.constexpr,
    FLOATS: tl.constexpr,
    EACH: tl.constexpr,
    MINIMUM: tl.constexpr,
    ASSEMBLY: tl.constexpr,
) -> None:
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    tile = tl.program_id(0) * (BN // 16) + tl.arange(0, BN // 16)
    group = tl.program_id(1)
    block = tile // 2
    planes = planes_of(out_ptr, planes_ptr, block, UNIFORM, ASSEMBLY)
    word_ptr = codes_ptr + (tile.to(tl.int64) * groups + group)[:, None] * 128 + tl.arange(0, 128)[None]
    word = tl.reshape(tl.load(word_ptr), [BN // 16, 32, 4])
    weight = decode(out_ptr, word, planes_ptr, block, planes, word, word, UNIFORM, False, ASSEMBLY)
    if FLOATS:
        scale = tl.load(scale_ptr + group // EACH * padded + n).to(tl.float32)
    else:
        four = tl.load(scale_ptr + group // 4 * padded + n)
        scale = (four << (24 - group % 4 * 8) >> 24).to(tl.float32) * (tl.load(row_scale_ptr + n) / _LEVELS)
    k = group * 64 + tl.arange(0, 64)
    kept = (n < num_out)[:, None] & (k < num_columns)[None]
    value = weight.to(tl.float32) * scale[:, None]
    if MINIMUM:
        value += tl.load(minimum_ptr + group // EACH * padded + n).to(tl.float32)[:, None]
    at = out_ptr + n.to(tl.int64)[:, None] * num_columns + k[None]
    tl.store(at, value.to(out_ptr.dtype.element_ty), mask=kept)


def decode_weight(
    codes: Tensor,
    planes: Tensor,
    scale: Tensor,
    row_scale: Tensor,
    num_out: int,
    num_columns: int,
    uniform: bool,
    dtype: torch.dtype,
    minimum: Tensor | None = None,
) -> Tensor:
    """Decode the weight [num_out, num_columns] to float16 or bfloat16; table entries are rounded to it first."""
    out = codes.new_empty((num_out, num_columns), dtype=dtype)
    launch(
        _decode,
        (cdiv(num_out, 64), cdiv(num_columns, GROUP)),
        codes,
        planes.view(torch.uint8) if INTERPRETED else planes,
        scale.view(torch.int32) if scale.dtype == torch.int8 else scale,
        scale if minimum is None else minimum,
        row_scale,
        out,
        num_out,
        scale.shape[1],
        num_columns,
        codes.shape[1],
        BN=64,
        UNIFORM=uniform,
        FLOATS=scale.is_floating_point(),
        EACH=num_columns // GROUP // scale.shape[0] if scale.is_floating_point() else 1,
        MINIMUM=minimum is not None,
        ASSEMBLY=not INTERPRETED,
        num_warps=4,
    )
    return out


def linear_lut4_fragments(
    x: Tensor,
    codes: Tensor,
    table: Tensor,
    planes: Tensor,
    scale: Tensor,
    row_scale: Tensor,
    bias: Tensor | None,
    out_features: int,
    uniform: bool,
    minimum: Tensor | None = None,
) -> Tensor:
    """`infer::linear_lut4_fragments` on CUDA tensors: x [..., K] → [..., out_features] in x's dtype."""
    same_device(x, codes, table, planes, scale, row_scale, bias, minimum)
    rows = flat_rows(x)
    if rows.dtype not in HALVES:
        weight = weight_of(codes, table, scale, row_scale, x.shape[-1], uniform, minimum)[:out_features]
        y = F.linear(rows, weight, None if bias is None else bias.float())
    elif rows.shape[0] < max(kernel_thresholds.of("lut4", x.device).library, fragment_gemm.MOST_ROWS + 1):
        y = fragment_gemm.linear(
            rows, codes, planes, scale, row_scale, bias, out_features, uniform, minimum=minimum
        )
    else:
        size = out_features, x.shape[-1]
        weight = decode_weight(codes, planes, scale, row_scale, *size, uniform, rows.dtype, minimum)
        y = F.linear(rows, weight, None if bias is None else bias.to(rows.dtype))
    return y.to(x.dtype).reshape(*x.shape[:-1], out_features)
