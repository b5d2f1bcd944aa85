"""Outputs of a model against those of a teacher, for models that take and give named tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ...errors import UsageError
from ...fidelity.metric_sums import is_logits, kept_rows, rows_of
from ...graph.program import flatten
from ..losses.row_divergence import row_divergence
from .layer_outputs import LayerOutputs, hidden_error

LOGITS_UNIT, OUTPUT_UNIT = "KL, nats", "squared relative error"


class OutputObjective:
    """KL of logits where a model has them, else the relative squared error of its outputs; a term is one row.

    Tokens that an `attention_mask` hides are no rows. `model` and `teacher` take the same tensors by name, and give
    those of `outputs`. `layers`: the model's and the teacher's layers whose hidden states are compared with weight
    `hidden`. `unit` is that of the divergence, known after the first call.
    """

    def __init__(
        self,
        model: nn.Module,
        teacher: nn.Module,
        outputs: Sequence[str],
        task: str,
        *,
        temperature: float = 1.0,
        hidden: float = 0.0,
        layers: tuple[Sequence[nn.Module], Sequence[nn.Module]] | None = None,
    ) -> None:
        self.model, self._teacher, self._outputs, self._task = model, teacher.eval(), tuple(outputs), task
        self._temperature, self._hidden = temperature, hidden if layers is not None else 0.0
        own, theirs = layers if layers is not None and hidden else ((), ())
        self._own, self._theirs = LayerOutputs(own), LayerOutputs(theirs)
        self.num_layers = len(own)
        self.unit = OUTPUT_UNIT

    def loss(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        total, terms = self._divergences(batch)
        own, theirs = self._own.taken(), self._theirs.taken()
        if self._hidden:
            mask = batch.get("attention_mask")
            error = hidden_error(own, theirs, None if mask is None else mask.bool())
            total = total + self._hidden * terms * error
        return total, terms

    def release(self) -> None:
        """Let the layers whose hidden states were compared run as before; `measure` still works."""
        self._own.remove()
        self._theirs.remove()
        self._hidden = 0.0

    def measure(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the sum of the divergences over the rows of all outputs, without hidden states, and their number."""
        found = self._divergences(batch)
        self._own.taken()  # else they would stay in memory until the next step
        self._theirs.taken()
        return found

    def _divergences(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            expected = self._named(self._teacher, batch)
        got = self._named(self.model, batch)
        logits = [name for name, value in expected.items() if is_logits(name, value, expected, self._task)]
        used = logits or [name for name, value in expected.items() if value.is_floating_point()]
        if not used:
            raise UsageError("the model has no float output to learn from")
        self.unit = LOGITS_UNIT if logits else OUTPUT_UNIT
        device = expected[used[0]].device
        total, count = torch.zeros((), device=device), torch.zeros((), dtype=torch.int64, device=device)
        for name in used:
            if got[name].shape != expected[name].shape:
                shapes = (
                    f"{list(expected[name].shape)} of the teacher, {list(got[name].shape)} of the student"
                )
                raise UsageError(f"output {name!r} differs in shape: {shapes}")
            want, own = (_rows(side[name], batch, bool(logits)) for side in (expected, got))
            total = total + (
                row_divergence(want, own, self._temperature)
                if logits
                else _squared_error(want.float(), own.float())
            )
            count = count + len(want)
        return total, count

    def _named(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        values = flatten(model(**batch))
        names = self._outputs or tuple(f"output{i}" for i in range(len(values)))
        if len(values) != len(names):
            raise UsageError(f"expected {len(names)} outputs, {type(model).__name__} gives {len(values)}")
        return dict(zip(names, values, strict=True))


def _rows(value: Tensor, batch: Mapping[str, Tensor], logits: bool) -> Tensor:
    kept = kept_rows(value, batch)
    rows = rows_of(value, logits, kept is not None)
    return rows if kept is None else rows.index_select(0, kept)


def _squared_error(expected: Tensor, got: Tensor) -> Tensor:
    """Sum squared errors over rows, in units of the mean squared norm of the expected rows."""
    norm = expected.square().sum(1).mean().clamp_min(torch.finfo(torch.float32).tiny)
    return (got - expected).square().sum() / norm
