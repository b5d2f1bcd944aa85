"""The end of a product whose columns were cut into parts: add the parts in order, scale, add the bias, round.

A kernel of its own in place of atomic additions: the order is fixed, so two runs give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .int8.int8_gemv import INTERPRETED
from .launch import cdiv, launch

_BLOCK = 256


@triton.jit
def product(a: tl.tensor, b: tl.tensor, ASSEMBLY: tl.constexpr) -> tl.tensor:
    """Multiply float32 with a rounding of its own: the addition that follows never becomes part of it.

    Compilers that embed a kernel drop Triton's option against fused multiply-adds; `mul.rn` keeps the promise itself.
    """
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    return a * b


@triton.jit
def _finish(
    partial_ptr: tl.tensor,  # float32 or int32 [parts, M, N]
    step_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    parts: tl.tensor,
    num_rows: tl.tensor,
    num_out: tl.tensor,
    STEPS: tl.constexpr,  # 0 none, 1 one for all rows, 2 one for each row
    SCALES: tl.constexpr,
    BIAS: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
    ASSEMBLY: tl.constexpr,
) -> None:
    m = tl.program_id(0)  # the axis without a limit of 65,535 programs
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < num_out
    at = m.to(tl.int64) * num_out + n
    plane = tl.full([BLOCK], num_rows, tl.int64) * num_out
    total = tl.zeros([BLOCK], partial_ptr.dtype.element_ty)
    for part in range(parts):
        total += tl.load(partial_ptr + at + plane * part, mask=mask, other=0)
    y = total.to(tl.float32)
    if STEPS > 0:
        step = tl.load(step_ptr + m) if STEPS == 2 else tl.load(step_ptr)
        y = product(y, tl.full([BLOCK], step, tl.float32), ASSEMBLY)
    if SCALES:
        y = product(y, tl.load(scale_ptr + n, mask=mask, other=0.0).to(tl.float32) / LEVELS, ASSEMBLY)
    if BIAS:
        y = y + tl.load(bias_ptr + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=mask)


def finish(
    partial: Tensor,
    step: Tensor | None,
    scale: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    levels: int = 1,
) -> Tensor:
    """`partial.sum(0) * step * scale / levels + bias` in `dtype`.

    partial [parts, M, N] is float32, or int32 whose sum is rounded to float32 once; step float32 [] or [M];
    scale and bias [N] or None.
    """
    parts, num_rows, num_out = partial.shape
    out = partial.new_empty((num_rows, num_out), dtype=dtype)
    launch(
        _finish,
        (num_rows, cdiv(num_out, _BLOCK)),
        partial,
        partial if step is None else step.contiguous(),
        partial if scale is None else scale.contiguous(),
        partial if bias is None else bias.contiguous(),
        out,
        parts,
        num_rows,
        num_out,
        STEPS=0 if step is None else 1 if step.numel() == 1 and num_rows != 1 else 2,
        SCALES=scale is not None,
        BIAS=bias is not None,
        LEVELS=levels,
        BLOCK=_BLOCK,
        ASSEMBLY=not INTERPRETED,
        num_warps=4,
    )
    return out
