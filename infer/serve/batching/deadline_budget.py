"""How large a batch may grow before those who wait for its end could no longer be answered in time."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .fair_queue import Part
    from .queue import Batcher
    from .queue_items import Entry

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


class Rooms:
    """Promises given to several tenants, who fill a batch of one `kind` in the order of their counters."""

    def __init__(self, parts: Iterable[Part], kind: Hashable, queue: Batcher, now: float) -> None:
        self._parts, self._kind, self._queue, self._now = list(parts), kind, queue, now
        self._next: list[tuple[Part, Item]] | None = None
        self._promises: dict[str, tuple[Promises, Promises]] = {}

    def before(self, part: Part, item: Item, served: float, work: float) -> float:
        """The most work with which all those are in time that go before an entry: what is more urgent of its tenant,
        and the next of each tenant with a counter below `served`. `work`: as `Promises` takes it."""
        if not self._next_of_each():
            return math.inf
        found = self._promises.get(part.name)
        if found is None:
            others = [first for other, first in self._next_of_each() if other is not part]
            options = self._queue, self._now, work
            found = Promises(part.items(self._kind), *options), Promises(others, *options)
            self._promises[part.name] = found
        return min(found[0].room(item[:2]), found[1].room((served, 0.0)))

    def _next_of_each(self) -> list[tuple[Part, Item]]:
        """The most urgent entry of each tenant, with its counter for an urgency."""
        if self._next is None:
            self._next = []
            for number, part in enumerate(self._parts):
                first = min(part.items(self._kind), default=None, key=lambda item: item[:3])
                if first is not None:
                    self._next.append((part, (part.served, 0.0, number, first[3])))
        return self._next
