"""Activations to int8 on a GPU: `round(x / step)`, halves to even, clamped to ±127; a step per row or given."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.linear_int8 import LEVELS, TINY
from ..launch import launch

_LEVELS = tl.constexpr(LEVELS)
_TINY = tl.constexpr(TINY)
_BLOCK = 2048
# Adding and taking away 1.5 * 2**23 rounds a float32 below 2**22 to an integer, halves to even.
_ROUNDER = tl.constexpr(1.5 * 2**23)


@triton.jit
def _quantize(
    x_ptr: tl.tensor,
    given_ptr: tl.tensor,
    q_ptr: tl.tensor,
    step_ptr: tl.tensor,
    num_columns: tl.tensor,
    GIVEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x_row = x_ptr + row * num_columns
    step = tl.load(given_ptr).to(tl.float32) if GIVEN else 0.0
    bad = tl.zeros([BLOCK], tl.int32)
    if not GIVEN:
        largest = tl.zeros([BLOCK], tl.float32)
        for start in range(0, num_columns, BLOCK):
            x = tl.load(x_row + start + at, mask=start + at < num_columns, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(x))
        step = tl.maximum(tl.div_rn(tl.max(largest, 0), _LEVELS * 1.0), _TINY)
    for start in range(0, num_columns, BLOCK):
        mask = start + at < num_columns
        x = tl.load(x_row + start + at, mask=mask, other=0.0).to(tl.float32)
        ratio = tl.div_rn(x, tl.zeros([BLOCK], tl.float32) + step)
        bad |= (ratio != ratio).to(tl.int32)
        ratio = tl.where(ratio != ratio, 0.0, ratio)
        ratio = tl.minimum(tl.maximum(ratio, -_LEVELS * 1.0), _LEVELS * 1.0)
        q = (ratio + _ROUNDER) - _ROUNDER
        tl.store(q_ptr + row * num_columns + start + at, q.to(tl.int8), mask=mask)
    # A NaN can't be an integer: the whole row gets a step of NaN, as the reference's sums get NaN.
    tl.store(step_ptr + row, tl.where(tl.max(bad, 0) > 0, float("nan"), step))


def quantize_rows(x: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor]:
    """Quantize x [M, K] float to int8 [M, K] with steps float32 [M].

    The step is NaN for a row with NaN, or with infinity unless `given`.
    """
    q = torch.empty_like(x, dtype=torch.int8)
    step = x.new_empty(x.shape[0], dtype=torch.float32)
    launch(
        _quantize,
        (x.shape[0],),
        x,
        x if given is None else given,
        q,
        step,
        x.shape[1],
        GIVEN=given is not None,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    return q, step
