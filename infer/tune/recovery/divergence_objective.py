"""Objective of recovery: how far a quantized model's outputs are from those of its float original, without labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ...fidelity.metric_sums import is_logits, kept_rows, rows_of
from ...graph.program import flatten

LOGITS_UNIT, OUTPUT_UNIT = "KL, nats", "squared relative error"


class DivergenceObjective:
    """KL of logits per token or row, where the model has logits; otherwise the squared relative error of its outputs.

    Tokens that an `attention_mask` hides do not count. `names` are those of the outputs.
    """

    def __init__(self, model: nn.Module, teacher: nn.Module, names: Sequence[str], task: str) -> None:
        self.model, self._teacher, self._names, self._task = model, teacher.eval(), names, task
        self.unit = OUTPUT_UNIT

    def loss(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the sum of the divergences over the rows of all outputs, and their number."""
        self.model.eval()  # no dropout, and no batch statistics: the student computes as it will run
        with torch.no_grad():
            expected = dict(zip(self._names, flatten(self._teacher(**batch)), strict=True))
        got = dict(zip(self._names, flatten(self.model(**batch)), strict=True))
        logits = [name for name, value in expected.items() if is_logits(name, value, expected, self._task)]
        used = logits or [name for name, value in expected.items() if value.is_floating_point()]
        self.unit = LOGITS_UNIT if logits else OUTPUT_UNIT
        total, count = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        for name in used:
            want, own = (self._rows(side[name], batch, bool(logits)) for side in (expected, got))
            total = total + (_divergence(want, own) if logits else _relative_error(want, own))
            count += len(want)
        return total, count

    def measure(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return `loss`; it is called without gradient."""
        return self.loss(batch)

    @staticmethod
    def _rows(value: Tensor, batch: Mapping[str, Tensor], logits: bool) -> Tensor:
        kept = kept_rows(value, batch)
        rows = rows_of(value, logits, kept is not None).float()
        return rows if kept is None else rows.index_select(0, kept)


def _divergence(expected: Tensor, got: Tensor) -> Tensor:
    """Sum KL(expected ‖ got) over rows of logits; classes that the original excludes (-inf) add nothing."""
    p, q = expected.log_softmax(-1), got.log_softmax(-1)
    return (p.exp() * (p - q)).where(p > -torch.inf, 0.0).sum()


def _relative_error(expected: Tensor, got: Tensor) -> Tensor:
    """Sum squared errors over rows, in units of the mean squared norm of the expected rows."""
    norm = expected.square().sum(1).mean().clamp_min(torch.finfo(torch.float32).tiny)
    return (got - expected).square().sum() / norm
