"""Pareto front: the trials that no other trial dominates."""

from __future__ import annotations

import math
from collections.abc import Sequence

Costs = Sequence[float | None]  # smaller is better; None is unknown and counts as worst


def front(points: Sequence[Costs]) -> list[int]:
    """Return the indices, in order, of the points that no other one dominates; of equal points the first.

    Points are sorted by their costs, so that a point can be dominated only by one before it: O(n log n + n f) for a
    front of f.
    """
    known = [tuple(math.inf if c is None or math.isnan(c) else float(c) for c in point) for point in points]
    kept: list[int] = []
    for index in sorted(range(len(known)), key=lambda i: (known[i], i)):
        if not any(_no_worse(known[other], known[index]) for other in kept):
            kept.append(index)
    return sorted(kept)


def dominates(a: Costs, b: Costs) -> bool:
    """Return True when `a` is nowhere worse than `b` and somewhere better."""
    first, second = ([math.inf if c is None or math.isnan(c) else c for c in side] for side in (a, b))
    return _no_worse(first, second) and first != second


def _no_worse(a: Sequence[float], b: Sequence[float]) -> bool:
    return all(x <= y for x, y in zip(a, b, strict=True))
