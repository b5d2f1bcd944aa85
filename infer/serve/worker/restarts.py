"""How often a worker may die, and how long to wait before it is started again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec


class RestartLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. A worker that dies `deaths` times within `window` is given up."""

    first: float = 0.1
    longest: float = 30.0
    deaths: int = 5
    window: float = 60.0


class Restarts:
    """Counts deaths; not thread-safe."""

    def __init__(self, limits: RestartLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._deaths: deque[float] = deque()
        self._in_a_row = 0
        self.total = 0

    def died(self) -> float | None:
        """Count one: the seconds to wait before the next start, doubled with each death in a row; None: give up."""
        now, limits = self._clock(), self._limits
        self._deaths.append(now)
        self.total += 1
        while now - self._deaths[0] > limits.window:
            self._deaths.popleft()
        if len(self._deaths) >= limits.deaths:
            return None
        wait = min(limits.first * 2**self._in_a_row, limits.longest)
        self._in_a_row += 1
        return wait

    def works(self) -> None:
        """It answered: the next death is the first in a row."""
        self._in_a_row = 0
