"""Hidden states of chosen layers of teacher and student, compared token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class LayerOutputs:
    """First tensor that each of some layers returned in the last forward pass, kept by hooks."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._found: list[Tensor | None] = [None] * len(layers)
        self._hooks = [layer.register_forward_hook(self._hook(index)) for index, layer in enumerate(layers)]

    def taken(self) -> list[Tensor]:
        """Return the outputs [batch, tokens, hidden] in the order of the layers, and keep none of them."""
        found = [each for each in self._found if each is not None]
        self._found = [None] * len(self._found)
        return found

    def remove(self) -> None:
        """Let the layers run as before, and keep nothing."""
        self.taken()
        for hook in self._hooks:
            hook.remove()

    def _hook(self, index: int) -> Any:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._found[index] = output if isinstance(output, Tensor) else output[0]

        return keep


def hidden_error(student: Sequence[Tensor], teacher: Sequence[Tensor], mask: Tensor | None) -> Tensor:
    """Return the mean over layers and tokens of |s - t|² / |t|², a differentiable scalar.

    mask bool [batch, tokens] of the tokens that count (default: all); tensors are [batch, tokens, hidden].
    """
    total = torch.zeros((), device=student[0].device)
    for own, wanted in zip(student, teacher, strict=True):
        own, wanted = own.float(), wanted.float()
        if mask is not None and mask.shape == own.shape[:-1]:
            own, wanted = own[mask], wanted[mask]
        norm = wanted.square().sum(-1).clamp_min(1e-12)
        total = total + ((own - wanted).square().sum(-1) / norm).mean()
    return total / max(len(student), 1)
