"""How large a batch may grow before those who wait for its end could no longer be answered in time."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .batching import Batcher
    from .entries import Entry

Urgency = tuple[float, float]  # priority, deadline
Item = tuple[float, float, int, "Entry"]


class Promises:
    """Those given to `waiting`, entries that can't join a batch which starts `now` and holds `work` at least.

    They are expected to run in the order of urgency, each kind of work in one batch, on as many lanes as there are.
    """

    def __init__(self, waiting: Iterable[Item], queue: Batcher, now: float, work: float) -> None:
        self._waiting = sorted(waiting, key=lambda item: item[:3], reverse=True)
        self._speed, self._now, self._lanes = queue.speed, now, queue.lanes
        self._least = queue.speed.seconds(work) * queue.speed.caution
        self._kinds, self._work, self._slack = set[Hashable](), 0.0, math.inf

    def room(self, urgency: Urgency) -> float:
        """The most work of that batch with which all who are more urgent will be in time, of those who can be.

        To be asked of ever less urgent ones: whoever is more urgent than all that waits would go first anyway.
        """
        speed = self._speed
        while self._waiting and self._waiting[-1][:2] < urgency:
            entry = self._waiting.pop()[3]
            kinds = len(self._kinds | {entry.key})
            for _ in range(entry.requests):
                work = self._work + entry.least
                slack = entry.deadline - self._now - speed.seconds(work, kinds) * speed.caution / self._lanes
                if slack < self._least:
                    break
                self._kinds.add(entry.key)
                self._work, self._slack = work, min(self._slack, slack)
        return speed.work_within(self._slack)
