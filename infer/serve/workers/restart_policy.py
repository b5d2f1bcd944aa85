"""How often a worker may die, and how long to wait before it is started again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec


class RestartLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. A worker that dies `deaths` times within `window`, and answers nothing in between, is given up."""

    first: float = 0.1
    longest: float = 30.0
    deaths: int = 5
    window: float = 60.0


class Restarts:
    """Counts deaths; not thread-safe.

    Deaths that a request is guilty of are the request's, or clients could end a server with a few of them. But only
    a worker that is known to answer something else is innocent: a model that dies of whatever it is asked is given up.
    A worker that answered since it was started is started again, however often something ends it.
    """

    def __init__(self, limits: RestartLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._deaths: deque[float] = deque()
        self._in_a_row = 0
        self._worked = False  # it answered something since it was last started
        self._proved = False  # it answered something since a request was last found guilty
        self._excused, self._lately = False, 0  # deaths that counted since
        self.total = 0

    def excuse(self, deaths: int = 2) -> None:
        """A request is guilty of so many: the one that `died` counts next, and those before."""
        if not self._proved:
            return
        for _ in range(min(deaths - 1, self._lately, len(self._deaths))):
            self._deaths.pop()
        self._proved, self._excused, self._lately = False, True, 0

    def died(self) -> float | None:
        """Count one: the seconds to wait before the next start, doubled with each death in a row; None: give up."""
        now, limits = self._clock(), self._limits
        if self._worked:
            self._deaths.clear()
            self._lately = 0
        elif not self._excused:
            self._deaths.append(now)
            self._lately += 1
        self._excused = self._worked = False
        self.total += 1
        while self._deaths and now - self._deaths[0] > limits.window:
            self._deaths.popleft()
        if len(self._deaths) >= limits.deaths:
            return None
        wait = min(limits.first * 2**self._in_a_row, limits.longest)
        self._in_a_row += 1
        return wait

    def works(self) -> None:
        """It answered: the next death is the first in a row."""
        self._in_a_row, self._worked, self._proved = 0, True, True

    def proved(self) -> None:
        """It was started, and gave the right answer to a question of its own."""
        self._proved = True
