"""Latency model: prediction of batch times from those measured."""

from __future__ import annotations

import math
from collections.abc import Iterable

MEMORY, LONG = 16, 256  # batches in the running means: of time, and of the slope
OUTLIER = 3.0  # times longer or shorter than predicted
MAX_OUTLIERS = 3  # in a row, after which the model starts again from them
FIXED_SHARE = 0.1  # of a useful batch's time that its fixed part may be
MARGIN = 2.0  # mean deviations that are added where being late has a cost


class LatencyModel:
    """Predicted seconds of a batch as a + b·work, fitted by least squares, the slope over a longer past.

    Work is in units of the caller, here elements with padding. One outlier counts as at most three times its
    prediction; after three outliers in a row the model is fitted again to these alone. `batches`: number observed;
    `fixed`, `each`: a and b; `relative_error`: mean relative error of the predictions.
    """

    def __init__(self) -> None:
        self.batches = 0
        self._outliers: list[tuple[float, float]] = []
        self._forget()

    @property
    def steady(self) -> bool:
        """True if the last batch was no outlier."""
        return not self._outliers

    def _forget(self) -> None:
        self._seen, self._largest, self.relative_error = 0, 0.0, 0.0
        self._work = self._time = 0.0
        self._long = [0.0] * 4  # means of work, seconds, work², work x seconds
        self.fixed = self.each = 0.0

    def seed(self, measured: Iterable[tuple[float, float]]) -> None:
        """Observe (work, seconds) of warm-up runs."""
        for work, seconds in measured:
            self.observe(work, seconds)

    def observe(self, work: float, seconds: float) -> None:
        """Observe one batch that ran alone on its executor."""
        self.batches += 1
        expected = self.seconds(work)
        known = self._seen > 1 and work <= 2 * self._largest  # a much larger batch is no outlier
        if known and not expected / OUTLIER <= seconds <= expected * OUTLIER:
            self._outliers.append((work, seconds))
            if len(self._outliers) >= MAX_OUTLIERS:
                recent, self._outliers = self._outliers, []
                self._forget()
                for one in recent:
                    self._learn(*one)
                return
            seconds = min(seconds, expected * OUTLIER)
        else:
            self._outliers.clear()
        self._learn(work, seconds)

    def _learn(self, work: float, seconds: float) -> None:
        expected, self._largest = self.seconds(work), max(self._largest, work)
        self._seen += 1
        weight = max(1 / self._seen, 1 / MEMORY)
        if expected:
            self.relative_error += weight * (abs(seconds - expected) / expected - self.relative_error)
        self._work += weight * (work - self._work)
        self._time += weight * (seconds - self._time)
        slow = max(1 / self._seen, 1 / LONG)
        now = work, seconds, work * work, work * seconds
        self._long = [mean + slow * (one - mean) for mean, one in zip(self._long, now, strict=True)]
        mean, time, square, product = self._long
        variance = square - mean * mean
        each = (product - mean * time) / variance if variance > 1e-6 * square else 0.0
        self.each = min(max(each, 0.0), self._time / self._work) if self._work else 0.0
        self.fixed = self._time - self.each * self._work

    def seconds(self, work: float, batches: float = 1) -> float:
        """Predict the seconds of `batches` with this work in total; 0 before the first: nothing is refused then."""
        return self.fixed * batches + self.each * work

    @property
    def longest(self) -> float:
        """Predicted seconds of the largest measured batch; 0 before the first."""
        return self.seconds(self._largest)

    @property
    def caution(self) -> float:
        """Factor for predicted seconds where being late has a cost: 1 + `MARGIN` relative errors."""
        return 1 + MARGIN * self.relative_error

    @property
    def useful_work(self) -> float:
        """Work of a batch beyond which throughput grows little: the fixed part is a tenth of the growing part."""
        return self.fixed / (FIXED_SHARE * self.each) if self.each else math.inf

    def work_within(self, seconds: float) -> float:
        """Return the most work of one batch predicted to end within `seconds`, with margin; infinite if unknown."""
        left = seconds / self.caution - self.fixed
        return math.inf if not self.each else left / self.each
