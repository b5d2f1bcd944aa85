"""KL divergence between the next-token distributions of a teacher and a student, without whole logits of either.

One pass over tiles of the vocabulary sums exp(t), exp(s) and exp(t) · (t - s) of every token with running maxima; the
backward computes each tile of both again. Only the student has gradients. With a temperature T both logits are
divided by T and the loss is multiplied by T², which keeps its gradients of one size (Hinton et al. 2015,
arXiv 1503.02531).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..memory.packed_rows import is_abstract
from .output_head import HeadGradients, OutputHead, token_chunks

PIECE = 1 << 18  # logits at a time


def cut_divergence(
    hidden: Tensor,
    head: OutputHead,
    teacher_hidden: Tensor,
    teacher_head: OutputHead,
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return T² · Σ KL(teacher ‖ student) over tokens (differentiable) and the number of tokens, both scalars.

    hidden [..., H], teacher_hidden [..., H'], mask bool [...] of the tokens that count (default: all). The sum is
    float32, of float64 float64. Raises `ValueError` for shapes or vocabularies that differ, or a temperature of 0.
    """
    if hidden.shape[:-1] != teacher_hidden.shape[:-1] or (
        mask is not None and mask.shape != hidden.shape[:-1]
    ):
        raise ValueError(f"tokens differ: {list(hidden.shape[:-1])} and {list(teacher_hidden.shape[:-1])}")
    if head.vocab != teacher_head.vocab:
        raise ValueError(f"the student has {head.vocab} tokens, the teacher {teacher_head.vocab}")
    if not temperature > 0:
        raise ValueError(f"expected a temperature above 0, got {temperature}")
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(kind))
        teacher_hidden = teacher_hidden.to(torch.get_autocast_dtype(kind))
    rows = hidden.reshape(-1, hidden.shape[-1])
    wanted = teacher_hidden.detach().reshape(-1, teacher_hidden.shape[-1])
    if mask is not None and not is_abstract(rows):
        kept = mask.reshape(-1).nonzero().squeeze(1)
        rows, wanted = rows.index_select(0, kept), wanted.index_select(0, kept)
    with torch.autocast(kind, enabled=False):
        total: Tensor = _CutDivergence.apply(
            rows, head.trainable_weight, head.bias, head, wanted, teacher_head, float(temperature)
        )
    return total, torch.tensor(rows.shape[0], device=rows.device)


def divergence_twin(
    hidden: Tensor,
    head: OutputHead,
    teacher_hidden: Tensor,
    teacher_head: OutputHead,
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Compute `cut_divergence` from whole logits, with torch's own gradients."""
    student = F.log_softmax(head.whole_logits(hidden) / temperature, -1)
    teacher = F.log_softmax(teacher_head.whole_logits(teacher_hidden) / temperature, -1).detach()
    each = (teacher.exp() * (teacher - student)).sum(-1)
    each = each if mask is None else each[mask]
    return each.sum() * temperature**2, torch.tensor(each.numel())


class _CutDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        head: OutputHead,
        wanted: Tensor,
        teacher: OutputHead,
        temperature: float,
    ) -> Tensor:
        kind = torch.promote_types(hidden.dtype, torch.float32)
        sums = DivergenceSums(len(hidden), kind, hidden.device)
        ctx.heads, ctx.temperature = (head, teacher), temperature
        ctx.save_for_backward(hidden, wanted, sums.student, sums.teacher)
        if is_abstract(hidden):
            head.note_workspace(hidden)
            return hidden.new_zeros((), dtype=kind)
        for start, stop in head.tiles(2 * len(hidden)):
            own = head.rows_for_logits(start, stop, hidden.dtype)
            theirs = teacher.rows_for_logits(start, stop, wanted.dtype)
            for part in token_chunks(len(hidden), 2 * (stop - start)):
                student_logits = head.logits(hidden[part], start, stop, own)
                teacher_logits = teacher.logits(wanted[part], start, stop, theirs)
                sums.add(
                    part, student_logits.to(kind).div_(temperature), teacher_logits.to(kind).div_(temperature)
                )
        return sums.divergence().sum() * temperature**2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, wanted, student_sum, teacher_sum = ctx.saved_tensors
        (head, teacher), temperature = ctx.heads, ctx.temperature
        gradients = HeadGradients(head, hidden, *ctx.needs_input_grad[:3])
        if is_abstract(hidden):
            head.note_workspace(hidden)
            return *gradients.finished(), None, None, None, None
        for start, stop in head.tiles(2 * len(hidden)):
            own = head.rows(start, stop, hidden.dtype)
            theirs = teacher.rows_for_logits(start, stop, wanted.dtype)
            for part in token_chunks(len(hidden), 2 * (stop - start)):
                logits = head.logits(hidden[part], start, stop, None if head.quantizer else own)
                target = teacher.logits(wanted[part], start, stop, theirs).to(logits.dtype)
                change = (logits / temperature).sub_(student_sum[part, None]).exp_()
                change -= target.div_(temperature).sub_(teacher_sum[part, None]).exp_()
                gradients.add(part, start, own, change.mul_(grad * temperature), logits)
        return *gradients.finished(), None, None, None, None


class DivergenceSums:
    """Running sums of a divergence for each token: log-sum-exp of both, and the teacher's mean of t - s."""

    def __init__(self, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        self.student = torch.full((tokens,), -torch.inf, dtype=dtype, device=device)
        self.teacher = self.student.clone()
        self.mean = torch.zeros((tokens,), dtype=dtype, device=device)

    def add(self, part: slice, student: Tensor, teacher: Tensor) -> None:
        """Add a tile of logits [M, V] of both; they are overwritten."""
        gained = teacher.logsumexp(1)
        total = torch.logaddexp(self.teacher[part], gained)
        self.student[part] = torch.logaddexp(self.student[part], student.logsumexp(1))
        gap = torch.sub(teacher, student, out=student)
        mean = gap.mul_(teacher.sub_(total[:, None]).exp_()).sum(1)
        self.mean[part] = self.mean[part] * (self.teacher[part] - total).exp() + mean
        self.teacher[part] = total

    def divergence(self) -> Tensor:
        """Return KL(teacher ‖ student) of each token: the mean of log-ratios of probabilities."""
        return self.mean - self.teacher + self.student


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
