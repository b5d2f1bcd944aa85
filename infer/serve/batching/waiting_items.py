"""Entries that wait for a batch, of one tenant or of all: in the order of urgency, by the kinds that share batches."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence

from .admission import LEAST_PRIORITY
from .deadline_budget import Item
from .latency_model import Speed
from .queue_items import Entry

AGING = 2.0  # seconds of waiting that are worth one step of priority, so that nobody starves


class Waiting:
    """Entries by kind and urgency; `requests`, `rows` and `bytes` are those of all. Not thread-safe."""

    def __init__(self, clock: Callable[[], float], speed: Speed) -> None:
        self.clock, self.speed = clock, speed
        self.requests = self.rows = self.bytes = 0
        self._queues: dict[Hashable, list[Item]] = {}
        self._waiting: dict[int, tuple[int, int]] = {}  # priority → rows and work
        self._order = itertools.count()
        self._dead = 0

    @property
    def kinds(self) -> int:
        """The number of kinds of work that wait, which can't share a batch."""
        return len(self._queues)

    @property
    def everybody(self) -> int:
        """Requests that wait, those of other tenants too."""
        return self.requests

    def items(self, without: Hashable = None) -> Iterator[Item]:
        """Items of the entries that wait, but for one kind."""
        queues = [queue for kind, queue in self._queues.items() if kind != without]
        return (item for queue in queues for item in queue if item[3].waiting)

    def ahead(self, priority: int = LEAST_PRIORITY, deadline: float | None = None) -> tuple[float, float]:
        """Rows and work that wait and would go before new work of this priority and, where given, deadline."""
        rows = work = 0
        if deadline is None:
            for urgency, (some, theirs) in self._waiting.items():
                if urgency <= priority:
                    rows, work = rows + some, work + theirs
            return rows, work
        mine = self._urgency(priority), deadline
        for item in self.items():
            if item[:2] <= mine:
                entry = item[3]
                rows, work = rows + entry.rows, work + entry.work
        return rows, work

    def _enter(self, entries: Sequence[Entry]) -> None:
        now = self.clock()
        for entry in entries:
            entry.arrived, entry.waiting = now, True
            queue = self._queues.setdefault(entry.key, [])
            urgency = self._urgency(entry.priority)
            heapq.heappush(queue, (urgency, entry.deadline, next(self._order), entry))
            self._count(entry, 1)

    def _urgency(self, priority: int) -> int:
        """The place of what comes now among all: what has waited goes before later work of more priority."""
        return priority + int(self.clock() / AGING)

    def cancel(self, entry: Entry) -> bool:
        """Take an entry out and let go of what it holds; False if it does not wait (it runs, or is over)."""
        if not entry.waiting:
            return False
        self._leave(entry)
        entry.inputs, entry.ticket = {}, None
        self._dead += 1
        if self._dead > max(64, self.requests):
            self._sweep()
        return True

    def drop(self, entry: Entry, at: int) -> bool:
        """Take one of the requests of an entry out; False if the entry does not wait."""
        if entry.requests == 1:
            return self.cancel(entry)
        if entry.waiting:
            self._count(entry, -1)
            entry.drop(at)
            self._count(entry, 1)
        return entry.waiting

    def clear(self) -> list[Entry]:
        """Take all entries out."""
        entries = [item[3] for item in self.items()]
        for entry in entries:
            self._leave(entry)
        self._queues.clear()
        return entries

    def _most_urgent(self, expired: list[Entry]) -> Hashable | None:
        now, best, chosen = self.clock(), None, None
        for key in list(self._queues):
            queue = self._queues[key]
            while queue and (
                not queue[0][3].waiting or self._hopeless(queue[0][3], now, alone=self.everybody == 1)
            ):
                entry = queue[0][3]
                if entry.waiting and self.everybody == entry.requests > 1 and entry.deadline > now:
                    entry = entry.take(entry.requests - 1)  # the last of them is tried
                else:
                    heapq.heappop(queue)
                if entry.waiting:
                    self._leave(entry)
                    expired.append(entry)
                else:
                    self._dead -= 1
            if not queue:
                del self._queues[key]
            elif best is None or queue[0][:3] < best:
                best, chosen = queue[0][:3], key
        return chosen

    def _hopeless(self, entry: Entry, now: float, *, alone: bool) -> bool:
        """Its time ran out, or will before it is done, at the cost of others: `alone` it is tried, which also tells
        whether the speed is still what it was."""
        return entry.deadline <= now + (0.0 if alone else self.speed.seconds(entry.least))

    def _leave(self, entry: Entry) -> None:
        entry.waiting = False
        self._count(entry, -1)

    def _count(self, entry: Entry, sign: int) -> None:
        self.requests += sign * entry.requests
        self.rows += sign * entry.rows
        self.bytes += sign * entry.size_bytes
        rows, work = self._waiting.get(entry.priority, (0, 0))
        if rows + sign * entry.rows:
            self._waiting[entry.priority] = rows + sign * entry.rows, work + sign * entry.work
        else:
            self._waiting.pop(entry.priority, None)

    def _sweep(self) -> None:
        for key, queue in list(self._queues.items()):
            self._queues[key] = alive = [item for item in queue if item[3].waiting]
            heapq.heapify(alive)
            if not alive:
                del self._queues[key]
        self._dead = 0
