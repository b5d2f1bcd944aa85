"""The Pareto front against the definition, pair by pair."""

from __future__ import annotations

import math
import random

import pytest

from infer.budget_search.final_artifact import pareto_front


def slow_front(points: list[tuple[float | None, ...]]) -> list[int]:
    """Keep what no other point dominates, and of equal points the first: every pair is compared."""
    plain = [tuple(math.inf if c is None else c for c in point) for point in points]
    kept = []
    for i, own in enumerate(plain):
        beaten = any(
            all(x <= y for x, y in zip(other, own, strict=True)) and (other != own or j < i)
            for j, other in enumerate(plain)
            if j != i
        )
        kept += [] if beaten else [i]
    return kept


@pytest.mark.parametrize("size", [0, 1, 2, 7, 60])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_the_front_is_that_of_its_definition(size: int, width: int) -> None:
    rng = random.Random(size * 10 + width)
    for _ in range(20):
        points = [tuple(rng.choice([None, 1, 2, 3, 4.5]) for _ in range(width)) for _ in range(size)]
        assert pareto_front(points) == slow_front(points)


def test_unknown_and_nan_count_as_worst() -> None:
    assert pareto_front([(1.0, None), (1.0, 5.0), (math.nan, 1.0), (2.0, 1.0)]) == [1, 3]


def test_of_equal_points_the_first_is_on_the_front() -> None:
    assert pareto_front([(1, 2), (1, 2)]) == [0]
    assert pareto_front([(1, 3), (1, 2)]) == [1]
    assert pareto_front([(1, 3), (2, 2)]) == [0, 1]
    assert pareto_front([(1, None), (1, 3)]) == [1]
