"""Cross-entropy of hidden states and an output head, without the logits of the whole batch.

Tiles of the vocabulary pass over the tokens: the forward keeps the log-sum-exp and the label's logit of every token,
the backward computes each tile of logits again. Method of Cut Cross-Entropy (Wijmans et al. 2024, arXiv 2411.09009),
without its filter of small gradients, so that gradients are exact. Tokens that are ignored are dropped first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..memory.packed_rows import is_abstract
from ..objective import IGNORED
from .output_head import HeadGradients, OutputHead, token_chunks


def cut_cross_entropy(
    hidden: Tensor, head: OutputHead, labels: Tensor, *, ignore_index: int = IGNORED
) -> tuple[Tensor, Tensor]:
    """Return the sum of the tokens' losses (differentiable) and their number (int64), both scalars.

    hidden [..., H] of any float dtype, labels int64 [...]; gradients flow to hidden, to a float weight and to the bias
    where they require them. Sums are float32, of float64 float64. Under autocast products have its dtype.
    Raises `ValueError` for shapes that do not fit and `IndexError` for a label outside the vocabulary.
    """
    if hidden.shape[:-1] != labels.shape or hidden.shape[-1] != head.columns:
        expected = f"[*labels.shape, {head.columns}] with labels {list(labels.shape)}"
        raise ValueError(f"expected hidden states {expected}, got {list(hidden.shape)}")
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    if not is_abstract(hidden):
        hidden, labels = _valid(hidden, labels, ignore_index, head.vocab)
    with torch.autocast(kind, enabled=False):
        total: Tensor = _CutCrossEntropy.apply(hidden, head.trainable_weight, head.bias, head, labels)
    return total, torch.tensor(labels.shape[0], device=labels.device)


def _valid(hidden: Tensor, labels: Tensor, ignore_index: int, vocab: int) -> tuple[Tensor, Tensor]:
    kept = labels != ignore_index
    if not bool(kept.all()):
        rows = kept.nonzero().squeeze(1)
        hidden, labels = hidden.index_select(0, rows), labels.index_select(0, rows)
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < vocab:
        raise IndexError(f"labels from {int(labels.min())} to {int(labels.max())} are not in 0..{vocab - 1}")
    return hidden, labels


def cross_entropy_twin(
    hidden: Tensor, head: OutputHead, labels: Tensor, *, ignore_index: int = IGNORED
) -> tuple[Tensor, Tensor]:
    """Compute `cut_cross_entropy` from the logits of the whole batch, with torch's own gradients."""
    logits, labels = head.whole_logits(hidden).reshape(-1, head.vocab), labels.reshape(-1)
    total = F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")
    return total, (labels != ignore_index).sum()


class _CutCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        head: OutputHead,
        labels: Tensor,
    ) -> Tensor:
        kind = torch.promote_types(hidden.dtype, torch.float32)
        normalizer = hidden.new_zeros(len(hidden), dtype=kind)
        ctx.head = head
        ctx.save_for_backward(hidden, labels, normalizer)
        if is_abstract(hidden):
            head.note_workspace(hidden)
            return hidden.new_zeros((), dtype=kind)
        normalizer.fill_(-torch.inf)
        chosen = torch.zeros_like(normalizer)
        for start, stop in head.tiles(len(hidden)):
            rows = head.rows_for_logits(start, stop, hidden.dtype)
            for part in token_chunks(len(hidden), stop - start):
                logits = head.logits(hidden[part], start, stop, rows)
                inside = _inside(labels[part], start, stop)
                chosen[part][inside] = logits[inside, labels[part][inside] - start]
                normalizer[part] = torch.logaddexp(normalizer[part], logits.logsumexp(1))
        return (normalizer - chosen).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, labels, normalizer = ctx.saved_tensors
        head: OutputHead = ctx.head
        wanted = ctx.needs_input_grad
        gradients = HeadGradients(head, hidden, wanted[0], wanted[1], wanted[2])
        if is_abstract(hidden):
            head.note_workspace(hidden)
            return *gradients.finished(), None, None
        for start, stop in head.tiles(len(hidden)):
            rows = head.rows(start, stop, hidden.dtype)
            for part in token_chunks(len(hidden), stop - start):
                logits = head.logits(hidden[part], start, stop, None if head.quantizer else rows)
                change = (logits - normalizer[part, None]).exp_()
                inside = _inside(labels[part], start, stop)
                change[inside, labels[part][inside] - start] -= 1
                gradients.add(part, start, rows, change.mul_(grad), logits)
        return *gradients.finished(), None, None


def _inside(labels: Tensor, start: int, stop: int) -> Tensor:
    return ((labels >= start) & (labels < stop)).nonzero().squeeze(1)
