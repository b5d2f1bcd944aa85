"""Growth of a number: Theil-Sen slopes, which outliers do not move, with a confidence interval."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence

Point = tuple[float, float]  # seconds, value


def theil_sen(lives: Sequence[Sequence[Point]], sure: float = 0.95) -> tuple[float, float, float] | None:
    """Return the median slope per second over all pairs of points within a life, and the ends of its interval.

    The interval is Sen's (1968): the slopes whose rank differs from the middle by the normal quantile times Kendall's
    standard deviation, which for lives that are compared only within themselves adds up. None of fewer than 3 points.
    """
    slopes = sorted(
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for life in lives
        for earlier, later in itertools.combinations(life, 2)
        if later[0] > earlier[0]
    )
    if len(slopes) < 3:
        return None
    variance = sum(n * (n - 1) * (2 * n + 5) / 18 for n in map(len, lives))
    away = statistics.NormalDist().inv_cdf((1 + sure) / 2) * math.sqrt(variance)
    low = max(math.floor((len(slopes) - away) / 2), 0)
    high = min(math.ceil((len(slopes) + away) / 2), len(slopes) - 1)
    return statistics.median(slopes), slopes[low], slopes[high]


def per_minute(points: Iterable[Point]) -> list[Point]:
    """Return the median of each minute: values seconds apart are not independent, as the interval supposes."""
    minutes: dict[int, list[float]] = {}
    for second, value in points:
        minutes.setdefault(int(second // 60), []).append(value)
    return [(60.0 * minute, statistics.median(values)) for minute, values in sorted(minutes.items())]


def above_mean(points: Sequence[Point]) -> float:
    """Return the largest value of the second half minus that half's mean."""
    half = [value for _, value in points[len(points) // 2 :]]
    return max(half) - statistics.fmean(half) if half else 0.0
