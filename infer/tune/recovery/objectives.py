"""Objectives of recovery: the divergence of the whole model from its original, and the error of one layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...fidelity.metric_sums import is_logits
from ...graph.program import flatten
from ..data.rows import digest_of, shuffled
from ..objective import Objective
from ..objectives.outputs import LayerOutputs, LayerPairs, OutputObjective, outermost_lists, token_errors
from .layer_calls import LayerCall, is_hidden
from .trainable_layers import TrainableLayers

FEWEST = 2


class Taught(Objective, Protocol):
    """Objective of what is recovered, a model or one of its layers.

    `trained`: what is trained, once it is; held-out rows are then measured with the weights as they would be packed, in
    the model's own precision, whatever the steps are computed in.
    """

    MODELS: int  # forward passes for each that `loss` runs, where the model and its original run
    trained: TrainableLayers | None

    def precision(self, batch: Any, noise: float) -> str:
        """Return "bfloat16" where its rounding is at most `noise` of the error to be mended, else "float32"."""
        ...


@contextmanager
def as_packed(trained: TrainableLayers | None, device: str) -> Iterator[None]:
    """Compute with weights as they would be packed, without autocast."""
    with nullcontext() if trained is None else trained.rounded(), torch.autocast(device, enabled=False):
        yield


class RecoveryObjective(OutputObjective):
    """Divergence of a student that computes in training as it will run: without dropout and batch statistics."""

    MODELS = 1
    trained: TrainableLayers | None = None

    def loss(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        self.model.eval()
        return super().loss(batch)

    def measure(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        with as_packed(self.trained, next(iter(batch.values())).device.type):
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

    A term is one token.
    """

    MODELS = 2
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
        with as_packed(self.trained, batch["hidden"].device.type):
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


@torch.no_grad()
def compared_layers(
    student: nn.Module, teacher: nn.Module, batch: Mapping[str, Tensor], names: Sequence[str], task: str
) -> LayerPairs | None:
    """Return layers of the student and those of the teacher, or None where the outputs say enough.

    They are the members of lists of layers, by name, which give hidden states [rows, tokens, hidden]. An embedding of
    a text says little about each of the codes that made it; the hidden states of its tokens say more. Logits, whose
    divergence is another unit, and outputs of as many numbers as a layer's need none. `batch` is run once.
    """
    found = [name for names in layer_lists(student, teacher) for name in names]
    theirs = [teacher.get_submodule(name) for name in found]
    if len(found) < FEWEST:
        return None
    outputs = LayerOutputs(theirs)
    try:
        values = flatten(teacher.eval()(**batch))
        states = outputs.taken()
    finally:
        outputs.remove()
    pairs = dict(zip(names, values, strict=False))
    if any(is_logits(name, value, pairs, task) for name, value in pairs.items()):
        return None
    if len(states) < len(found) or not all(is_hidden(each) for each in states):
        return None
    if sum(value.numel() for value in values) >= min(each.numel() for each in states):
        return None
    return [student.get_submodule(name) for name in found], theirs


def layer_lists(student: nn.Module, teacher: nn.Module) -> list[list[str]]:
    """Return the names of the layers of each outermost list of at least `FEWEST` that both models have."""
    lists = []
    for name, layers in outermost_lists(student, lambda layers: len(layers) >= FEWEST).items():
        members = [f"{name}.{index}" if name else str(index) for index in range(len(layers))]
        lists.append([member for member in members if _has(teacher, member)])
    return lists


def _has(model: nn.Module, name: str) -> bool:
    try:
        model.get_submodule(name)
    except AttributeError:
        return False
    return True
