"""Equality of integer and bool outputs: of all values, of the values that are rare, and of their range."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

MOST_VALUES = 4096  # different ones that are counted apart
FEW = 4  # different values of a flag: two of a kind are enough to judge it
FEWEST = 5  # of a value among many others
TIE = 1e-5  # of the spread of a row: classes nearer than this are equally good


class IntegerSums:
    """Sums of one output; `exact`: no weight reaches it, so that no rounding explains a change."""

    def __init__(self, *, exact: bool = False) -> None:
        self._exact = exact
        self._values = self._equal = self._changed = 0
        self._range: list[int] = []
        self._got: list[int] = []
        self._counts: dict[int, list[int]] = {}
        self._chosen = True  # all of it so far is the best class of a float output
        self._example = ""

    def add(self, reference: Tensor, got: Tensor, kept: Tensor | None, floats: Mapping[str, Tensor]) -> None:
        """Add a batch; of its rows [rows * places] those `kept`; `floats`: the float model's other outputs."""
        same, chosen = reference == got, choice_of(reference, floats)
        if chosen is None:
            self._chosen = False
        else:
            same = same | _tied(chosen, reference, got)
        values = [t if kept is None else t.flatten(0, 1)[kept] for t in (reference, got, same)]
        expected, actual, equal = (t.reshape(-1) for t in values)
        if not len(expected):
            return
        self._values, self._equal = self._values + len(equal), self._equal + int(equal.sum())
        expected, actual = expected.long(), actual.long()
        self._range = _widened(self._range, expected)
        self._got = _widened(self._got, actual)
        if not self._example and not bool(equal.all()):
            first = int((~equal).int().argmax())
            self._example = f"{int(expected[first])} became {int(actual[first])}"
        if len(self._counts) <= MOST_VALUES:
            found, where, counts = expected.unique(return_inverse=True, return_counts=True)
            hits = torch.zeros_like(counts).index_add_(0, where, equal.to(counts.dtype))
            for value, count, hit in zip(found.tolist(), counts.tolist(), hits.tolist(), strict=True):
                known = self._counts.setdefault(value, [0, 0])
                known[0], known[1] = known[0] + count, known[1] + hit

    def metrics(self) -> Iterator[tuple[str, float | int | None, str]]:
        """Yield (metric, value, place)."""
        yield "exact", self._equal / self._values if self._values else None, self._example
        if self._chosen and self._values:
            yield "rows", self._values, ""
        if not self._values or self._equal == self._values:
            return
        if self._exact:
            yield "changed", self._values - self._equal, self._example
        if self._got[0] < self._range[0] or self._got[1] > self._range[1]:
            far = self._got[1] if self._got[1] > self._range[1] else self._got[0]
            margin = (self._range[1] - self._range[0]) // 2 + 1
            if not self._range[0] - margin <= far <= self._range[1] + margin:
                yield "out_of_range", far, f"the float model's lie in {self._range[0]}..{self._range[1]}"
        if len(self._counts) <= MOST_VALUES:
            fewest = 2 if len(self._counts) <= FEW else FEWEST
            rare = [
                (hit / n, f"{hit} of {n} times {v}") for v, (n, hit) in self._counts.items() if n >= fewest
            ]
            if rare:
                yield "worst_value", *min(rare)


def choice_of(chosen: Tensor, floats: Mapping[str, Tensor]) -> tuple[Tensor, int] | None:
    """Return the float output and its axis of which integers are the best class; None where there is none."""
    if chosen.dtype == torch.bool:
        return None
    for value in floats.values():
        if not value.is_floating_point():
            continue
        for axis in range(value.dim() - 1, 0, -1):
            without = value.shape[:axis] + value.shape[axis + 1 :]
            if chosen.shape == without and bool((value.argmax(axis) == chosen).all()):
                return value, axis
    return None


def _tied(chosen: tuple[Tensor, int], reference: Tensor, got: Tensor) -> Tensor:
    """Return where another class was chosen that is as good but for rounding."""
    value, axis = chosen
    size = value.shape[axis]
    inside = (got >= 0) & (got < size)
    own, other = (
        value.gather(axis, index.clamp(0, size - 1).long().unsqueeze(axis)).squeeze(axis).double()
        for index in (reference, got)
    )
    spread = (value.amax(axis) - value.amin(axis)).double()
    return inside & (own - other <= TIE * spread)


def _widened(known: list[int], values: Tensor) -> list[int]:
    low, high = int(values.min()), int(values.max())
    return [min(low, *known[:1]), max(high, *known[1:])] if known else [low, high]
