"""Outputs of a student against those of its teacher, for models that take and give tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UsageError
from ...fidelity.metric_sums import is_logits, kept_rows, rows_of
from .layer_outputs import LayerOutputs, hidden_error


class OutputObjective:
    """KL of logits, relative squared error of other outputs; a term is one row that a decision is made on.

    `model` and `teacher` take and give the same tensors, by the names of `inputs` and `outputs`. `layers`: pairs of
    lists of the student's and the teacher's layers whose hidden states are compared with weight `hidden`.
    """

    def __init__(
        self,
        model: nn.Module,
        teacher: nn.Module,
        inputs: Sequence[str],
        outputs: Sequence[str],
        task: str,
        *,
        temperature: float = 1.0,
        hidden: float = 0.0,
        layers: tuple[Sequence[nn.Module], Sequence[nn.Module]] | None = None,
    ) -> None:
        self.model, self.teacher = model, teacher.requires_grad_(False).eval()
        self.inputs, self.outputs, self.task = tuple(inputs), tuple(outputs), task
        self.temperature, self.hidden = temperature, hidden if layers is not None else 0.0
        own, theirs = layers if layers is not None and hidden else ((), ())
        self._own, self._theirs = LayerOutputs(own), LayerOutputs(theirs)

    def loss(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            expected = self._call(self.teacher, batch)
        total, terms = self._distance(self._call(self.model, batch), expected, batch)
        own, theirs = self._own.taken(), self._theirs.taken()
        if self.hidden:
            mask = batch.get("attention_mask")
            error = hidden_error(own, theirs, None if mask is None else mask.bool())
            total = total + self.hidden * terms * error
        return total, terms

    def measure(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the sum of the outputs' divergences, without hidden states, and the rows."""
        found = self._distance(self._call(self.model, batch), self._call(self.teacher, batch), batch)
        self._own.taken()
        self._theirs.taken()
        return found

    def _call(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found: Any = model(*(batch[name] for name in self.inputs))
        if isinstance(found, Mapping):
            found = tuple(found.values())
        values = found if isinstance(found, tuple | list) else (found,)
        names = self.outputs or tuple(f"output{i}" for i in range(len(values)))
        if len(values) != len(names):
            raise UsageError(f"expected {len(names)} outputs, got {len(values)} of {type(model).__name__}")
        return dict(zip(names, values, strict=True))

    def _distance(
        self, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], batch: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the sum over rows of the mean over outputs, and the number of rows of the first output."""
        sums: list[tuple[Tensor, int]] = []
        for name, wanted in expected.items():
            if not wanted.is_floating_point() or not wanted.numel():
                continue
            own = found[name]
            if own.shape != wanted.shape:
                shapes = f"{list(wanted.shape)} of the teacher, {list(own.shape)} of the student"
                raise UsageError(f"output {name!r} differs in shape: {shapes}", where="--student")
            kept = kept_rows(wanted, batch)
            logits = is_logits(name, wanted, expected, self.task)
            got, given = (rows_of(each, logits, kept is not None) for each in (own, wanted))
            if kept is not None:
                got, given = got.index_select(0, kept), given.index_select(0, kept)
            distance = _divergence(got, given, self.temperature) if logits else _squared_error(got, given)
            sums.append((distance.sum(), len(distance)))
        if not sums:
            raise UsageError("the model has no float output to learn from", where="TEACHER")
        rows = sums[0][1]
        total = torch.stack([each * (rows / max(count, 1)) for each, count in sums]).mean()
        return total, torch.tensor(rows, device=total.device)


def _divergence(own: Tensor, wanted: Tensor, temperature: float) -> Tensor:
    """Return T² · KL(teacher ‖ student) of each row; classes that the teacher masks with -inf count nothing."""
    student = (own.float() / temperature).log_softmax(-1)
    teacher = (wanted.float() / temperature).log_softmax(-1)
    terms = teacher.exp() * (teacher - student)
    return terms.where(teacher > -torch.inf, 0.0).sum(-1) * temperature**2


def _squared_error(own: Tensor, wanted: Tensor) -> Tensor:
    """Return |s - t|² of each row over the mean |t|² of all rows: rows near zero don't outweigh the others."""
    norm = wanted.float().square().sum(-1).mean().clamp_min(1e-12)
    return (own.float() - wanted.float()).square().sum(-1) / norm
