"""KL divergence between rows of logits of a teacher and a student, in pieces of rows that stay in the cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

PIECE = 1 << 18  # logits at a time


def row_divergence(expected: Tensor, got: Tensor, temperature: float = 1.0) -> Tensor:
    """Return T² · Σ KL(expected ‖ got) over rows of logits [R, V], float32 and differentiable in `got`.

    Logits of any float dtype are divided by the temperature T; classes that the teacher excludes (-inf) add nothing.
    """
    total: Tensor = _RowDivergence.apply(got, expected, float(temperature))
    return total


class _RowDivergence(torch.autograd.Function):
    """The gradient, a difference of probabilities, is computed with the loss."""

    @staticmethod
    def forward(ctx: Any, got: Tensor, expected: Tensor, temperature: float) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=got.device)
        gradient = torch.empty_like(got) if ctx.needs_input_grad[0] else None
        size = max(PIECE // max(got.shape[1], 1), 1)
        for start in range(0, len(got), size):
            rows = slice(start, start + size)
            p, q = ((side[rows].float() / temperature).log_softmax(-1) for side in (expected, got))
            share = p.exp()
            total += (share * (p - q)).where(p > -torch.inf, 0.0).sum() * temperature**2
            if gradient is not None:
                gradient[rows] = q.exp_().sub_(share).mul_(temperature)
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None
        (gradient,) = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), None, None
