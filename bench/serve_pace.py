"""Runs of a client, each between two bursts of the same client, which tell what the server can do just then.

A burst is a few seconds of more than the server can do: same client, same front, same model, same cores as in the run
between them. What a run did is told as a share of the mean of the two bursts' goodputs, so that a machine whose speed
changes by the minute compares loads and not minutes; of a change within seconds something stays. A run during which
programs that are not ours, or the hypervisor, took more than a tenth of a core, or whose two bursts differ by a
quarter, is made again: at most `AGAIN` times, `MOST_AGAIN` in all, and not because of what the server did in it.

What bursts can't show: a server that does less than it could under every load alike. And each is short, so that the
noise of a run's share is mostly theirs; `docs/decisions.md` has figures, also of what was used before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import psutil

from serve import say

AGAIN, MOST_AGAIN = 2, 12
MOST_TAKEN = 0.1  # of a core, by others
MOST_DRIFT = 1.25  # of the bursts
SETTLE = 0.3  # seconds between runs


class Fire(Protocol):
    def __call__(self, phases: list[list[float]], *, seed: int, **how: Any) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class Run:
    """`rows` as `serve_openloop` says; `beside`: goodput of the bursts around it."""

    rows: np.ndarray
    beside: float


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
    """`fire`, left alone by others as far as that can be had."""

    def __init__(self, fire: Fire) -> None:
        self._fire, self._others = fire, Others()
        self._burst: Callable[[], float] | None = None
        self._last: float | None = None
        self.runs = self.again = self.unfair = 0

    def beside(self, burst: Callable[[], float]) -> None:
        """From now on each run stands between two bursts; they give good answers a second."""
        self._burst, self._last = burst, None

    def fire(self, phases: list[list[float]], **how: Any) -> Run:
        """Phases of seconds and requests a second."""
        self.runs += 1
        for attempt in range(AGAIN + 1):
            before = self._read() if self._last is None else self._last
            self._others.begin()
            rows = self._fire(phases, **how)
            taken = self._others.cores()
            self._last = after = self._read()
            fair = taken <= MOST_TAKEN and 1 / MOST_DRIFT <= after / before <= MOST_DRIFT
            if fair or attempt == AGAIN or self.again == MOST_AGAIN:
                break
            self.again += 1
            say(f"again: others took {taken:.2f} cores, bursts of {before:.0f} and {after:.0f}/s")
        self.unfair += not fair
        return Run(rows, (before + after) / 2)

    def _read(self) -> float:
        if self._burst is None:
            return 1.0
        time.sleep(SETTLE)
        found = self._burst()
        time.sleep(SETTLE)
        if not found:
            raise SystemExit("nothing was answered in a burst")
        return found

    @property
    def note(self) -> str:
        return f"{self.runs} runs, {self.again} made again, {self.unfair} of them left disturbed"
