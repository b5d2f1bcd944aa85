"""Histogram of times with logarithmic buckets, fine enough for percentiles.

Percentiles of an interval are computed from the difference of two snapshots.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp2, log2

PER_OCTAVE = 8  # a bucket is 9 % wide, so a percentile read from it is within 4.5 %
UNIT = 1e-6  # seconds at which bucket 0 begins


class LogHistogram:
    """Counts since the start: bucket i holds UNIT·2^(i/8) to UNIT·2^((i+1)/8) seconds."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def observe(self, seconds: float) -> None:
        index = int(log2(seconds / UNIT) * PER_OCTAVE) if seconds > UNIT else 0
        self.counts[index] = self.counts.get(index, 0) + 1


def percentile(counts: Mapping[int, int], share: float) -> float | None:
    """Return the seconds below which `share` of the counts lie, to half a bucket; None without counts."""
    left = share * sum(counts.values())
    for index in sorted(counts):
        left -= counts[index]
        if left <= 0:
            return UNIT * exp2((index + 0.5) / PER_OCTAVE)
    return None
