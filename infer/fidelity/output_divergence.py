"""Divergence from kept float outputs: mean KL per row for logits, else squared relative error of the outputs.

Against `metrics` it keeps the float side (its softmax, its norm) from call to call: it is asked hundreds of times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .metric_sums import is_logits, kept_rows, rows_of
from .slice_sums import FEWEST_ROWS, MOST_SLICES, ROUNDING

# Values that are compared in float64: effects of good formats are near the rounding of float32.
MOST_DOUBLE = 1 << 20


class OutputDivergence:
    """Divergence of other outputs from these float `outputs` of `inputs`, named by `names`; `unit` is that of `of`."""

    def __init__(
        self, names: Sequence[str], outputs: Sequence[Tensor], inputs: Mapping[str, Tensor], task: str
    ) -> None:
        pairs = dict(zip(names, outputs, strict=True))
        logits = [name for name, value in pairs.items() if is_logits(name, value, pairs, task)]
        # Logits tell what matters of a model that has them; its other outputs are not mixed in.
        self._used = [i for i, name in enumerate(names) if name in logits or not logits]
        self._used = [i for i in self._used if outputs[i].is_floating_point()]
        self.logits, self._inputs = bool(logits), inputs
        self.unit = "nats" if logits else "squared relative error"
        self._float = [self._side(outputs[i]) for i in self._used]
        self._shapes = [outputs[i].shape for i in self._used]

    def _side(self, output: Tensor) -> Tensor:
        kept = kept_rows(output, self._inputs)
        rows = rows_of(output, self.logits, kept is not None)
        rows = rows.double() if rows.numel() <= MOST_DOUBLE else rows.float()
        rows = rows if kept is None else rows.index_select(0, kept)
        return rows.log_softmax(-1) if self.logits else rows

    @torch.no_grad()
    def of(self, outputs: Sequence[Tensor]) -> float:
        """Return the divergence from the float output; infinite for NaN or infinity that the float output lacks."""
        total = 0.0
        for reference, index, shape in zip(self._float, self._used, self._shapes, strict=True):
            got = self._side(outputs[index])
            if self.logits:
                total += _kl(reference, got)
            elif reference.numel() == math.prod(shape):
                total += max(_squared_error(reference, got), _of_slices(reference, got, shape))
            else:
                total += _squared_error(reference, got)
        return total if math.isfinite(total) else math.inf


def _kl(p: Tensor, q: Tensor) -> float:
    """Return the mean of KL(p || q) over rows of log-probabilities."""
    terms = (p.exp() * (p - q)).where(p > -math.inf, 0.0).nan_to_num_(nan=math.inf, posinf=math.inf)
    each = terms.sum(-1, dtype=torch.float64)
    return max(float(each.mean()), 0.0) if len(each) else 0.0


def _of_slices(reference: Tensor, got: Tensor, shape: Sequence[int]) -> float:
    """Return the mean over slices of the squared error relative to their deviation, of the axis where it is largest.

    A small head counts as much as one with larger values, and what is constant over the rows is no part of the scale.
    """
    if len(shape) < 2 or shape[0] < FEWEST_ROWS:
        return 0.0
    worst, expected, actual = 0.0, reference.reshape(shape).double(), got.reshape(shape).double()
    deviation = (expected - expected.mean(0)).square()
    error = (actual - expected).square()
    for axis, size in enumerate(shape[1:], 1):
        if 2 <= size <= MOST_SLICES:
            others = [d for d in range(len(shape)) if d != axis]
            scale, lost, magnitude = (t.mean(others) for t in (deviation, error, expected.square()))
            varies = scale > (ROUNDING * torch.finfo(torch.float32).eps) ** 2 * magnitude
            if bool(varies.any()):
                worst = max(worst, float((lost[varies] / scale[varies]).mean()))
    return worst


def _squared_error(reference: Tensor, got: Tensor) -> float:
    norm = float(reference.double().square().sum())
    error = float((got - reference).double().square().sum())
    if norm == 0:
        return 0.0 if error == 0 else math.inf
    return error / norm
