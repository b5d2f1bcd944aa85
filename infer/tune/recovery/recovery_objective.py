"""Loss of recovery: the divergence of a quantized model from its float original."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..objectives.output_objective import OutputObjective
from .trainable_layers import TrainableLayers


class RecoveryObjective(OutputObjective):
    """Divergence of a student that computes in training as it will run: without dropout and batch statistics.

    `layers`: what is trained, once it is; held-out rows are then measured with the weights as they would be packed.
    """

    layers: TrainableLayers | None = None

    def loss(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        self.model.eval()
        return super().loss(batch)

    def measure(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Measure in the model's own precision, whatever the steps are computed in."""
        packed = nullcontext() if self.layers is None else self.layers.rounded()
        with packed, torch.autocast(next(iter(batch.values())).device.type, enabled=False):
            return super().measure(batch)

    @torch.no_grad()
    def precision(self, batch: Mapping[str, Tensor], noise: float) -> str:
        """Return "bfloat16" where its rounding moves the teacher by at most `noise` of the student's divergence."""
        device = next(iter(batch.values())).device.type
        divergence, _ = self.measure(batch)
        rounded = OutputObjective(
            _InBfloat16(self._teacher, device), self._teacher, self._outputs, self._task
        )
        own, _ = rounded.measure(batch)
        return "bfloat16" if float(own) <= noise * float(divergence) else "float32"


class _InBfloat16(nn.Module):
    def __init__(self, model: nn.Module, device: str) -> None:
        super().__init__()
        self._model, self._device = model, device

    def forward(self, **inputs: Tensor) -> Any:
        with torch.autocast(self._device, torch.bfloat16):
            return self._model(**inputs)
