"""Measure of wrong answers by arithmetic of its own: nothing here comes from the gate that it tests.

A fault is one where a row or a slice is off by three times what its precision may lose, relative to how much that slice
deviates from its mean over the rows; for a float plan by one percent. Integers, shapes and dtypes are exact, and of
classes the best one may change three times as often as allowed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

WIDEST = 64  # entries of an axis that is judged slice by slice
FEWEST = 32  # numbers of a slice that say how much it deviates
ALLOWED = {
    "none": (0.0033, 0.003),
    "int8": (0.10, 0.02),
    "nf4": (0.30, 0.15),
}  # error, share of changed classes
FAULT = 3.0  # times what is allowed

Answers = Sequence[Mapping[str, Tensor]]


def times_allowed(want: Answers, got: Answers, quant: str, task: str) -> tuple[float, str]:
    """Return how many times what is allowed the worst output is off over all calls, and where."""
    error, flips = ALLOWED[quant]
    worst = (0.0, "")
    for name in want[0]:
        if any(name not in answer for answer in got):
            return math.inf, f"{name} is missing"
        sides = [[answer[name].detach().cpu() for answer in side] for side in (want, got)]
        reason = _differ_in_form(*sides)
        if reason:
            return math.inf, f"{name}: {reason}"
        groups: dict[tuple[int, ...], list[tuple[np.ndarray, np.ndarray]]] = {}
        for w, g in zip(*sides, strict=True):
            groups.setdefault(tuple(w.shape[1:]), []).append((_array(w), _array(g)))
        for pairs in groups.values():
            w, g = (np.concatenate(side) for side in zip(*pairs, strict=True))
            found = [
                (size / error, f"{name}, {place}")
                for size, place in _errors(w, g, exact=not sides[0][0].is_floating_point())
            ]
            if task == "classification" and sides[0][0].is_floating_point() and w.ndim == 2:
                found.append((_flips(w, g) / flips, f"{name}, best class"))
            worst = max([worst, *found])
    return worst


def _differ_in_form(want: Sequence[Tensor], got: Sequence[Tensor]) -> str:
    for w, g in zip(want, got, strict=True):
        if w.shape != g.shape:
            return f"shape {list(g.shape)}, not {list(w.shape)}"
        if w.dtype != g.dtype:
            return f"{g.dtype}, not {w.dtype}"
        if w.is_floating_point() and bool((w.isfinite() & ~g.isfinite()).any()):
            return "NaN or infinity"
    return ""


def _array(value: Tensor) -> np.ndarray:
    return (
        value.reshape(len(value) if value.dim() else 1, *value.shape[1:])
        .to(torch.float64 if value.is_floating_point() else torch.int64)
        .numpy()
    )


def _errors(want: np.ndarray, got: np.ndarray, *, exact: bool) -> list[tuple[float, str]]:
    """List relative errors of the worst row and of the worst entry of every axis."""
    if exact:
        return [(math.inf if (want != got).any() else 0.0, "integers")]
    both = np.isfinite(want) & np.isfinite(got)
    want, got = np.where(both, want, 0.0), np.where(both, got, 0.0)
    scale = np.abs(want).max(initial=0.0)
    if scale == 0:
        return [(math.inf if np.any(got) else 0.0, "zeros")]
    difference = (got - want) / scale
    spread = (want - want.mean(0)) / scale if len(want) > 2 else want / scale
    found = []
    typical = math.sqrt(np.square(spread).reshape(len(want), -1).sum(1).mean())
    rows = np.sqrt(np.square(difference).reshape(len(want), -1).sum(1))
    found.append(
        (_ratio(float(rows.max(initial=0.0)), typical), f"row {int(rows.argmax()) if len(rows) else 0}")
    )
    for axis in range(1, want.ndim):
        if not 1 < want.shape[axis] <= WIDEST or want.size < FEWEST * want.shape[axis]:
            continue
        others = tuple(i for i in range(want.ndim) if i != axis)
        each = np.sqrt(np.square(difference).sum(others)), np.sqrt(np.square(spread).sum(others))
        flat = np.sqrt(np.square(want / scale).sum(others))
        ratios = [
            _ratio(float(d), float(s) if s > 1e-9 * f else float(f))
            for d, s, f in zip(*each, flat, strict=True)
        ]
        found.append((max(ratios), f"axis {axis}, entry {int(np.argmax(ratios))}"))
    return found


def _ratio(difference: float, size: float) -> float:
    if difference == 0:
        return 0.0
    return difference / size if size else math.inf


def _flips(want: np.ndarray, got: np.ndarray) -> float:
    """Share of rows whose best class is not one of the right best ones."""
    chosen = np.take_along_axis(want, got.argmax(1)[:, None], 1)[:, 0]
    return float((chosen < want.max(1)).mean())
