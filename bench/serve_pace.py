"""Runs of a client against a machine whose speed changes by the minute, told as at one speed.

A yardstick (the model alone, in a process of its own) is timed before and after each run. Rates are asked for, and
told, as at the machine's usual speed, the yardstick's first: what is sent is scaled by its latest reading, what came
back divided by the mean of both. A run during which programs that are not ours, or the hypervisor, took more than a
tenth of a core, or whose two readings differ by a quarter, is made again: at most `AGAIN` times, `MOST_AGAIN` in all,
and not because of what the server did in it.

What is left: alone and for a moment the yardstick can run faster than the model does under the server, and a run beside
such a reading then looks slow. The table shows each rung's reading; docs/decisions.md has a case.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import psutil

from serve import say

AGAIN, MOST_AGAIN = 2, 20
MOST_TAKEN = 0.1  # of a core, by others
MOST_DRIFT = 1.25  # of the yardstick
READINGS = 3  # whose median is the usual speed
SETTLE = 0.3  # seconds between runs


class Fire(Protocol):
    def __call__(self, phases: list[list[float]], *, seed: int, **how: Any) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class Run:
    """`rows` as `serve_openloop` says; `pace`: the machine's speed, 1 being its usual one; `fair`: left alone."""

    rows: np.ndarray
    pace: float
    fair: bool


class Others:
    """Cores that were taken by whatever is not this process or of it, since `begin`."""

    def __init__(self) -> None:
        self._root = psutil.Process()
        self.begin()

    def begin(self) -> None:
        self._when, self._all, self._own = time.monotonic(), self._busy(), self._ours()

    def cores(self) -> float:
        """Its grain is 0.01 s for each of our processes."""
        seconds = time.monotonic() - self._when
        return (self._busy() - self._all - (self._ours() - self._own)) / seconds

    def _busy(self) -> float:
        times = psutil.cpu_times()
        kinds = ("user", "nice", "system", "irq", "softirq", "steal")
        return sum(getattr(times, kind, 0.0) for kind in kinds)

    def _ours(self) -> float:
        processes = [self._root, *self._root.children(recursive=True)]
        return sum(sum(one.cpu_times()[:2]) for one in processes)


class Paced:
    """`fire` beside a `yardstick`, which gives work per second."""

    def __init__(self, fire: Fire, yardstick: Callable[[], float]) -> None:
        self._fire, self._yardstick, self._others = fire, yardstick, Others()
        self.usual = statistics.median([yardstick() for _ in range(READINGS)])
        self._now = 1.0
        self.runs = self.again = self.unfair = 0

    def fire(self, phases: list[list[float]], **how: Any) -> Run:
        """Phases of seconds and requests a second at the usual speed."""
        self.runs += 1
        for attempt in range(AGAIN + 1):
            before = self._now
            self._others.begin()
            rows = self._fire([[seconds, rate * before] for seconds, rate in phases], **how)
            taken = self._others.cores()
            time.sleep(SETTLE)
            self._now = self._yardstick() / self.usual
            fair = taken <= MOST_TAKEN and 1 / MOST_DRIFT <= self._now / before <= MOST_DRIFT
            if fair or attempt == AGAIN or self.again == MOST_AGAIN:
                break
            self.again += 1
            say(f"again: others took {taken:.2f} cores, the machine's speed {before:.2f} -> {self._now:.2f}")
        self.unfair += not fair
        return Run(rows, (before + self._now) / 2, fair)

    @property
    def note(self) -> str:
        return f"{self.runs} runs, {self.again} made again, {self.unfair} of them left disturbed"
