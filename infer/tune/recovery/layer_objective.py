"""Objective and rows of one layer that is trained alone, on hidden states that were computed before."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..objective import digest_of, shuffled
from .layer_calls import LayerCall
from .trainable_layers import TrainableLayers

LAYER_UNIT = "squared relative error of hidden states"


class LayerBatches:
    """Batches of hidden states as the rows of a training run: `order` is that of whole batches.

    `calls` are the layer's, `hidden` what it gets and `targets` what it should return, [rows, tokens, hidden] each;
    `masks` are bool [rows, tokens] of the tokens that count, None: all.
    """

    def __init__(
        self,
        calls: Sequence[LayerCall],
        hidden: Sequence[Tensor],
        targets: Sequence[Tensor],
        masks: Sequence[Tensor | None],
    ) -> None:
        self._batches = list(zip(calls, hidden, targets, masks, strict=True))

    def __len__(self) -> int:
        return len(self._batches)

    def order(self, seed: int, epoch: int) -> Sequence[int]:
        return shuffled(len(self), seed, epoch)

    def batch(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Return one batch; raises `ValueError` for more, whose calls can't be joined."""
        (number,) = numbers
        call, hidden, target, mask = self._batches[number]
        return {"call": dict(call), "hidden": hidden, "target": target, "mask": mask}

    @property
    def digest(self) -> str:
        """Hash of the first batch."""
        _, hidden, target, _ = self._batches[0]
        return digest_of({"hidden": hidden.float(), "target": target.float()})


class LayerObjective:
    """Sum over tokens of |s - t|² / |t|², of the layer's hidden states s and those of the float layer, t.

    A term is one token. `trained`: what is trained, once it is; `measure` computes with the weights as they would be
    packed, in the model's own precision.
    """

    trained: TrainableLayers | None = None

    def __init__(self, layer: nn.Module) -> None:
        self.model = layer

    def loss(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        self.model.eval()
        got = LayerCall(batch["call"]).run(self.model, batch["hidden"]).float()
        error = token_errors(got, batch["target"].float(), batch["mask"])
        return error.sum(), torch.tensor(error.numel())

    @torch.no_grad()
    def measure(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        packed = nullcontext() if self.trained is None else self.trained.rounded()
        with packed, torch.autocast(batch["hidden"].device.type, enabled=False):
            return self.loss(batch)

    @torch.no_grad()
    def precision(self, batch: dict[str, Any], noise: float) -> str:
        """Return "bfloat16" where its rounding moves the layer by at most `noise` of its error, else "float32"."""
        call, hidden, mask = LayerCall(batch["call"]), batch["hidden"], batch["mask"]
        exact = call.run(self.model, hidden).float()
        with torch.autocast(hidden.device.type, torch.bfloat16):
            rounded = call.run(self.model, hidden).float()
        error = float(token_errors(exact, batch["target"].float(), mask).sum())
        return "bfloat16" if float(token_errors(rounded, exact, mask).sum()) <= noise * error else "float32"


def token_errors(got: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
    """Return |s - t|² / |t|² of each token that counts: [rows, tokens, hidden] twice → [number of tokens]."""
    if mask is not None:
        got, target = got[mask], target[mask]
    norm = target.square().sum(-1).clamp_min(1e-12)
    return ((got - target).square().sum(-1) / norm).reshape(-1)
