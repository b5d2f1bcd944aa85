"""`linear_int8`, `_static` and `_weight` on a GPU, with the numerics of `infer.kernels.ops.linear_int8`.

The sums of int8 products are exact int32. They come from one of three: dot products of words of four codes (a few rows
of x), tensor-core tiles of ours, or `torch._int_mm` (cuBLASLt) from a measured number of rows on, where its shapes
allow.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import kernel_thresholds
from ..epilogue import finish
from ..launch import flat_rows, same_device
from . import w8a16_gemv
from .int8_gemm import products, weight_only
from .int8_gemv import linear as few_rows
from .int8_gemv import usable
from .int8_quantize import quantize_rows

_FEWEST = 17  # rows that `torch._int_mm` takes


def linear_int8(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """`infer::linear_int8` on CUDA tensors: one step for each row of x."""
    same_device(x, codes, scale, bias)
    q, step = quantize_rows(flat_rows(x), None)
    return _shaped(x, _product(q, codes, step, scale, bias, x.dtype))


def linear_int8_static(
    x: Tensor, codes: Tensor, scale: Tensor, x_scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`infer::linear_int8_static` on CUDA tensors: one step for all."""
    same_device(x, codes, scale, x_scale, bias)
    q, step = quantize_rows(flat_rows(x), x_scale)
    return _shaped(x, _product(q, codes, step, scale, bias, x.dtype))


def linear_int8_weight(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """`infer::linear_int8_weight` on CUDA tensors: codes are exact in x's type, sums float32."""
    same_device(x, codes, scale, bias)
    rows = flat_rows(x)
    path = w8a16_gemv.linear if w8a16_gemv.usable(rows) else weight_only
    return _shaped(x, path(rows, codes, scale, bias).to(x.dtype))


def _product(
    q: Tensor, codes: Tensor, step: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    (num_rows, num_columns), num_out = q.shape, codes.shape[0]
    limit = kernel_thresholds.of("int8", q.device)
    if num_rows < limit.tiles and usable(q, codes):
        sums = few_rows(q, codes)
    elif num_rows >= limit.library and num_columns % 8 == 0 and num_out % 8 == 0:
        sums = library(q, codes)
    else:
        sums = products(q, codes)
    return finish(sums, step, scale, bias, dtype)


def library(q: Tensor, codes: Tensor) -> Tensor:
    """Multiply by cuBLASLt: sums int32 [1, M, N] of q int8 [M, K], codes int8 [N, K]; K and N multiples of 8."""
    num_rows = q.shape[0]
    if num_rows < _FEWEST:
        q = F.pad(q, (0, 0, 0, _FEWEST - num_rows))
    return torch._int_mm(q, codes.t())[None, :num_rows]


def _shaped(x: Tensor, y: Tensor) -> Tensor:
    return y.reshape(*x.shape[:-1], y.shape[-1])
