"""Multiple-choice knapsack: one option per item, least total cost within a size.

Dynamic programming over discretised sizes (Dudzinski & Walukiewicz, EJOR 1987). Where all sizes are multiples of a unit
and the whole range has at most `CELLS` of them, the answer is exact; else sizes are rounded up, so that an answer never
exceeds its size, and what rounding left is spent greedily.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CELLS = 1 << 16


@dataclass(frozen=True)
class KnapsackOption:
    name: str
    size: int
    cost: float


class ParetoFront:
    """Least cost at every size, for one list of options per item; solved once by dynamic programming."""

    def __init__(self, items: Sequence[Sequence[KnapsackOption]], *, cells: int = CELLS) -> None:
        """Solve for all sizes; raise `ValueError` for an item without options."""
        self.items = [_useful(options) for options in items]
        self.smallest = sum(options[0].size for options in self.items)
        self.largest = sum(options[-1].size for options in self.items)
        extra = [option.size - options[0].size for options in self.items for option in options]
        self.unit = max(math.gcd(*extra) if extra else 1, -(-(self.largest - self.smallest) // cells), 1)
        self._taken, self.costs = self._solve(
            -(-(self.largest - self.smallest) // self.unit) + len(self.items)
        )

    def _solve(self, capacity: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the option taken [items, capacity + 1] and the least cost per number of units."""
        best = np.zeros(capacity + 1)
        taken = np.zeros((len(self.items), capacity + 1), dtype=np.uint8)
        for row, options in enumerate(self.items):
            value = best + options[0].cost
            for index, option in enumerate(options[1:], 1):
                units = self._units(options, option)
                other = best[: capacity + 1 - units] + option.cost
                better = other < value[units:]
                value[units:][better] = other[better]
                taken[row, units:][better] = index
            best = value
        return taken, best

    def _units(self, options: Sequence[KnapsackOption], option: KnapsackOption) -> int:
        return -(-(option.size - options[0].size) // self.unit)

    def at(self, size: int) -> list[KnapsackOption] | None:
        """Return the options of least total cost whose sizes sum to at most `size`; None when nothing is so small."""
        if size < self.smallest:
            return None
        left = min((size - self.smallest) // self.unit, len(self.costs) - 1)
        chosen: list[KnapsackOption] = []
        for options, taken in zip(reversed(self.items), reversed(self._taken), strict=True):
            option = options[taken[left]]
            chosen.append(option)
            left -= self._units(options, option)
        return self._spend_rest(chosen[::-1], size)

    def _spend_rest(self, chosen: list[KnapsackOption], size: int) -> list[KnapsackOption]:
        """Apply single changes of largest gain while they fit in the size that rounding left unused."""
        while True:
            room = size - sum(option.size for option in chosen)
            gains = [
                (old.cost - new.cost, row, new)
                for row, old in enumerate(chosen)
                for new in self.items[row]
                if new.cost < old.cost and new.size - old.size <= room
            ]
            if not gains:
                return chosen
            _, row, new = max(gains, key=lambda gain: gain[:2])
            chosen[row] = new

    def within(self, cost: float) -> list[KnapsackOption]:
        """Return the smallest options whose total cost is at most `cost`; the least costly when none is."""
        reached = np.flatnonzero(self.costs <= cost * (1 + 1e-12))
        cell = int(reached[0]) if len(reached) else len(self.costs) - 1
        return self.at(self.smallest + cell * self.unit) or []


def _useful(options: Sequence[KnapsackOption]) -> list[KnapsackOption]:
    """Sort options by size, without dominated ones."""
    if not options:
        raise ValueError("an item without options")
    kept: list[KnapsackOption] = []
    for option in sorted(options, key=lambda o: (o.size, o.cost)):
        if not kept or option.cost < kept[-1].cost:
            kept.append(option)
    return kept
