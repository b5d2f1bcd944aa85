"""Operators that replace many small ones: rms_norm, rotate, and the fused programs `infer::chain` run natively.

    rms_norm(x, weight, offset, eps)   x / sqrt(mean(x²) + eps) * (weight + offset) over the last axis
    rotate(x, cos, sin)                rotary positions: the first R columns (a, b) → (a cos - b sin, b cos + a sin),
                                       R the width of cos and sin, which broadcast against x
    chain(operands, program, numbers)  a fused program in one call: float32 [rows, width];
                                       see cpu/src/fused_program/fused_program.h
    chain_attend(kv_cache, …)          the same with attention over a paged cache, which is written

`passes.fused_program.match` finds the first two in captured programs, `partition` makes fused programs of them; the
reference of a fused program is the graph that it was made from.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .define_op import declare, define

HEADER = 12  # numbers before the program proper, listed in torch_fused_program.cpp


def _rms_norm(x: Tensor, weight: Tensor | None, offset: float, eps: float) -> Tensor:
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * (weight + offset)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    turned = x[..., :width]
    a, b = turned[..., : width // 2], turned[..., width // 2 :]
    y = turned * cos + torch.cat([-b, a], -1) * sin
    return y if width == x.shape[-1] else torch.cat([y, x[..., width:]], -1)


def _like(x: Tensor, *rest: object) -> Tensor:
    return x.new_empty(x.shape)


def result_shape(operands: Sequence[Tensor], program: Sequence[int]) -> tuple[int, ...]:
    """Return [rows, width] of a fused program's result; rows of several sizes are counted as its tokens are."""
    tokens, tokens_width, picked = program[:3]
    lead, domain, width = program[HEADER - 1 : HEADER + 2]
    if lead:
        return *operands[tokens].shape[:lead], width
    return operands[tokens].numel() // tokens_width if domain == 0 else operands[picked].numel(), width


def _program_shape(operands: Sequence[Tensor], program: Sequence[int], numbers: Sequence[float]) -> Tensor:
    return operands[0].new_empty(result_shape(operands, program), dtype=torch.float32)


def _attend_shape(
    kv_cache: Tensor, operands: Sequence[Tensor], program: Sequence[int], numbers: Sequence[float]
) -> Tensor:
    return _program_shape(operands, program, numbers)


define("rms_norm(Tensor x, Tensor? weight, float offset, float eps) -> Tensor", _rms_norm, _like)
define("rotate(Tensor x, Tensor cos, Tensor sin) -> Tensor", _rotate, _like)
declare("chain(Tensor[] operands, int[] program, float[] numbers) -> Tensor", _program_shape)
declare(
    "chain_attend(Tensor(a!) kv_cache, Tensor[] operands, int[] program, float[] numbers) -> Tensor",
    _attend_shape,
)
