"""Loss of the best class along an axis, of outputs that are not known to be logits.

Any axis may hold classes; numbers of another kind have a largest one as well, which a faithful model keeps. A change
among nearly equal ones costs nearly nothing: what counts is how much lower the chosen class is in the float model, over
how far its best class stands out, both summed over the rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .slice_sums import HIDDEN, ROUNDING, epsilon

MOST_CLASSES = 1 << 16
SORTED = 1024  # of more classes the mean stands for the median
CHUNK = 1 << 18


class ChoiceSums:
    """Sums of one output [rows, ...] of one shape; its first batch decides which runs of an axis hold classes."""

    def __init__(self, first: Tensor) -> None:
        axes = {2: (1,), 3: (1, 2), 4: (1,)}.get(first.dim(), ())
        self._groups = [(axis, run) for axis in axes for run in _runs(first, axis)]
        self._lost, self._stands = [0.0] * len(self._groups), [0.0] * len(self._groups)
        self._rounding = ROUNDING * epsilon(first)

    def add(self, reference: Tensor, got: Tensor, real: Tensor | None) -> None:
        """Add a batch; `real` [rows, places] is false where a row has padding."""
        for index, (axis, run) in enumerate(self._groups):
            pair = [value.movedim(axis, -1)[..., run] for value in (reference, got)]
            if real is not None and axis == 1:  # a padded place is none to choose
                shown = real.reshape(len(real), *[1] * (pair[0].dim() - 2), -1)[..., run]
                pair = [value.where(shown, -torch.inf) for value in pair]
            width = pair[0].shape[-1]
            expected, actual = (value.reshape(-1, width) for value in pair)
            kept = None
            if real is not None and axis == 2:
                kept = real.reshape(-1).nonzero().reshape(-1)
            count = len(expected) if kept is None else len(kept)
            for start in range(0, count, max(1, CHUNK // width)):
                part = slice(start, start + max(1, CHUNK // width))
                rows = part if kept is None else kept[part]
                lost, stands = self._loss(expected[rows].double(), actual[rows].double())
                self._lost[index] += lost
                self._stands[index] += stands

    def _loss(self, expected: Tensor, got: Tensor) -> tuple[float, float]:
        shown = expected.isfinite() & (expected > HIDDEN[0])
        expected, got = (side.where(shown, -torch.inf) for side in (expected, got.nan_to_num(-torch.inf)))
        best = expected.amax(-1)
        chosen = expected.gather(-1, got.argmax(-1, keepdim=True)).squeeze(-1)
        if expected.shape[-1] <= SORTED:
            middle = expected.where(shown, torch.nan).nanmedian(-1).values
        else:
            middle = expected.where(shown, 0.0).sum(-1) / shown.sum(-1).clamp(min=1)
        known = best.isfinite() & chosen.isfinite()
        lost = (best - chosen - self._rounding * best.abs()).clamp(min=0)
        return float(lost[known].sum()), float((best - middle)[known].sum())

    def worst(self) -> tuple[float, str] | None:
        """Return the largest loss with its axis and classes; None without classes."""
        found = [
            (lost / stands if stands > 0 else 0.0, f"axis {axis} index {run.start}..{run.stop - 1}")
            for (axis, run), lost, stands in zip(self._groups, self._lost, self._stands, strict=True)
        ]
        return max(found, default=None)


def _runs(first: Tensor, axis: int) -> list[slice]:
    """Return the runs of neighbours with shares alone (0 to 1) along an axis that holds others too, else all of it."""
    size = first.shape[axis]
    if not 2 <= size <= MOST_CLASSES or not first.numel():
        return []
    by_class = first.movedim(axis, 0).reshape(size, -1)
    shares = ((by_class >= 0) & (by_class <= 1)).all(1).tolist()
    if all(shares) or not any(shares):
        return [slice(0, size)]
    runs, begin = [], 0
    for index in range(1, size + 1):
        if index == size or shares[index] != shares[begin]:
            if shares[begin] and index - begin > 1:
                runs.append(slice(begin, index))
            begin = index
    return runs
