"""How long a batch will take, learned from those that ran."""

from __future__ import annotations

import math
from collections.abc import Iterable

MEMORY, LONG = 16, 256  # batches: each weighs a 16th, in what is told of more and of less work a 256th
STRANGE = 3.0  # times longer or shorter than expected
USUAL = 3  # that many strange ones in a row are how it is now
WORTH = 0.1  # of a batch's time that its fixed part may be
DOUBT = 2.0  # mean deviations that are added where being late costs
TAIL = 3.0  # of waits for first tokens: short prompts overtake, so that few wait much longer than the mean


class LatencyModel:
    """Predicted seconds of a batch as a + b·work, fitted by least squares, the slope over a longer past.

    Work is what the caller counts, here elements with their padding. One batch that takes strangely long counts as
    three times what was expected at most; after three strange ones in a row all that was known before is forgotten.
    """

    def __init__(self) -> None:
        self.batches = 0
        self._strange: list[tuple[float, float]] = []
        self._forget()

    @property
    def steady(self) -> bool:
        """The last batch was as expected."""
        return not self._strange

    def _forget(self) -> None:
        self._seen, self._largest, self.relative_error = 0, 0.0, 0.0
        self._work = self._time = 0.0
        self._long = [0.0] * 4  # means of work, seconds, work², work x seconds
        self.fixed = self.each = 0.0

    def seed(self, measured: Iterable[tuple[float, float]]) -> None:
        """(work, seconds) of runs made before the first request."""
        for work, seconds in measured:
            self.observe(work, seconds)

    def observe(self, work: float, seconds: float) -> None:
        """A batch of that much work ran, alone on its executor."""
        self.batches += 1
        expected = self.seconds(work)
        known = self._seen > 1 and work <= 2 * self._largest  # a much larger batch is new, not strange
        if known and not expected / STRANGE <= seconds <= expected * STRANGE:
            self._strange.append((work, seconds))
            if len(self._strange) >= USUAL:
                recent, self._strange = self._strange, []
                self._forget()
                for one in recent:
                    self._learn(*one)
                return
            seconds = min(seconds, expected * STRANGE)
        else:
            self._strange.clear()
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
        """Of so many batches with so much work together; 0 before the first: what is unmeasured turns nobody away."""
        return self.fixed * batches + self.each * work

    @property
    def longest(self) -> float:
        """Seconds of the largest batch that was measured; 0 before the first."""
        return self.seconds(self._largest)

    @property
    def caution(self) -> float:
        """What expected seconds are multiplied with where being late costs."""
        return 1 + DOUBT * self.relative_error

    @property
    def useful_work(self) -> float:
        """So much in one batch that more would make little cheaper: the fixed part is a tenth of that which grows."""
        return self.fixed / (WORTH * self.each) if self.each else math.inf

    def work_within(self, seconds: float) -> float:
        """The most work of one batch that is done in that time, doubt included; infinite where it can't be told."""
        left = seconds / self.caution - self.fixed
        return math.inf if not self.each else left / self.each


class ThroughputModel:
    """Work per second where pieces of it end at any time: the ratio of two running means."""

    def __init__(self) -> None:
        self._seen, self._work, self._time = 0, 0.0, 0.0

    def observe(self, work: float, seconds: float) -> None:
        if self._seen > USUAL:
            seconds = min(seconds, STRANGE * STRANGE * self.seconds(max(work, self._work)))
        self._seen += 1
        weight = max(1 / self._seen, 1 / MEMORY)
        self._work += weight * (work - self._work)
        self._time += weight * (seconds - self._time)

    def seconds(self, work: float) -> float:
        """0 before anything was measured."""
        return work * self._time / self._work if self._work else 0.0


class WaitErrorModel:
    """How far off the waits were that were foretold: in proportion to them, or a + b·wait by least squares where that
    is less, for much of the error of a short wait is the step that was under way. A wait of nothing is not doubted.
    """

    def __init__(self) -> None:
        self._seen = 0
        self._means = [0.0] * 4  # of the waits foretold, seconds off, wait², wait x seconds off

    def observe(self, told: float, seconds: float) -> None:
        """Seconds foretold (0: nothing was), and how many it took."""
        if told <= 0:
            return
        self._seen += 1
        weight, off = max(1 / self._seen, 1 / MEMORY), min(abs(seconds - told), STRANGE * told)
        now = told, off, told * told, told * off
        self._means = [mean + weight * (one - mean) for mean, one in zip(self._means, now, strict=True)]

    def caution(self, told: float) -> float:
        """Seconds that are added to a wait where being late costs."""
        mean, off, square, product = self._means
        if not mean:
            return 0.0
        share, variance = off / mean, square - mean * mean
        each = (product - mean * off) / variance if variance > 1e-6 * square else share
        each = min(max(each, 0.0), share)
        return TAIL * min(share * told, off + each * (told - mean))
