"""Entries that wait for a batch, of one tenant or of all: in the order of urgency, by the kinds that share batches."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence

from .admission import LOWEST_PRIORITY
from .deadline_budget import HeapEntry
from .latency_model import LatencyModel
from .queue_items import QueueItem

AGING = 2.0  # seconds of waiting that are worth one step of priority, so that nobody starves


class WaitingItems:
    """Entries by kind and urgency; `requests`, `rows` and `bytes` are those of all. Not thread-safe."""

    def __init__(self, clock: Callable[[], float], latency: LatencyModel) -> None:
        self.clock, self.latency = clock, latency
        self.requests = self.rows = self.bytes = 0
        self._queues: dict[Hashable, list[HeapEntry]] = {}
        self._waiting: dict[int, tuple[int, int]] = {}  # priority → rows and work
        self._order = itertools.count()
        self._dead = 0

    @property
    def kinds(self) -> int:
        """The number of kinds of work that wait, which can't share a batch."""
        return len(self._queues)

    @property
    def total_requests(self) -> int:
        """Requests that wait, those of other tenants too."""
        return self.requests

    def items(self, without: Hashable = None) -> Iterator[HeapEntry]:
        """Items of the entries that wait, but for one kind."""
        queues = [queue for kind, queue in self._queues.items() if kind != without]
        return (heap_entry for queue in queues for heap_entry in queue if heap_entry[3].waiting)

    def ahead(self, priority: int = LOWEST_PRIORITY, deadline: float | None = None) -> tuple[float, float]:
        """Rows and work that wait and would go before new work of this priority and, where given, deadline."""
        rows = work = 0
        if deadline is None:
            for urgency, (some, theirs) in self._waiting.items():
                if urgency <= priority:
                    rows, work = rows + some, work + theirs
            return rows, work
        mine = self._urgency(priority), deadline
        for heap_entry in self.items():
            if heap_entry[:2] <= mine:
                item = heap_entry[3]
                rows, work = rows + item.rows, work + item.work
        return rows, work

    def _enter(self, items: Sequence[QueueItem]) -> None:
        now = self.clock()
        for item in items:
            item.arrived, item.waiting = now, True
            queue = self._queues.setdefault(item.key, [])
            urgency = self._urgency(item.priority)
            heapq.heappush(queue, (urgency, item.deadline, next(self._order), item))
            self._count(item, 1)

    def _urgency(self, priority: int) -> int:
        """The place of what comes now among all: what has waited goes before later work of more priority."""
        return priority + int(self.clock() / AGING)

    def cancel(self, item: QueueItem) -> bool:
        """Take an entry out and let go of what it holds; False if it does not wait (it runs, or is over)."""
        if not item.waiting:
            return False
        self._leave(item)
        item.inputs, item.owner = {}, None
        self._dead += 1
        if self._dead > max(64, self.requests):
            self._sweep()
        return True

    def drop(self, item: QueueItem, at: int) -> bool:
        """Take one of the requests of an entry out; False if the entry does not wait."""
        if item.requests == 1:
            return self.cancel(item)
        if item.waiting:
            self._count(item, -1)
            item.drop(at)
            self._count(item, 1)
        return item.waiting

    def clear(self) -> list[QueueItem]:
        """Take all entries out."""
        items = [heap_entry[3] for heap_entry in self.items()]
        for item in items:
            self._leave(item)
        self._queues.clear()
        return items

    def _most_urgent(self, expired: list[QueueItem]) -> Hashable | None:
        now, best, chosen = self.clock(), None, None
        for key in list(self._queues):
            queue = self._queues[key]
            while queue and (
                not queue[0][3].waiting
                or self._cannot_finish(queue[0][3], now, alone=self.total_requests == 1)
            ):
                item = queue[0][3]
                if item.waiting and self.total_requests == item.requests > 1 and item.deadline > now:
                    item = item.take(item.requests - 1)  # the last of them is tried
                else:
                    heapq.heappop(queue)
                if item.waiting:
                    self._leave(item)
                    expired.append(item)
                else:
                    self._dead -= 1
            if not queue:
                del self._queues[key]
            elif best is None or queue[0][:3] < best:
                best, chosen = queue[0][:3], key
        return chosen

    def _cannot_finish(self, item: QueueItem, now: float, *, alone: bool) -> bool:
        """Its time ran out, or will before it is done, at the cost of others: `alone` it is tried, which also tells
        whether the speed is still what it was."""
        return item.deadline <= now + (0.0 if alone else self.latency.seconds(item.least))

    def _leave(self, item: QueueItem) -> None:
        item.waiting = False
        self._count(item, -1)

    def _count(self, item: QueueItem, sign: int) -> None:
        self.requests += sign * item.requests
        self.rows += sign * item.rows
        self.bytes += sign * item.size_bytes
        rows, work = self._waiting.get(item.priority, (0, 0))
        if rows + sign * item.rows:
            self._waiting[item.priority] = rows + sign * item.rows, work + sign * item.work
        else:
            self._waiting.pop(item.priority, None)

    def _sweep(self) -> None:
        for key, queue in list(self._queues.items()):
            self._queues[key] = alive = [heap_entry for heap_entry in queue if heap_entry[3].waiting]
            heapq.heapify(alive)
            if not alive:
                del self._queues[key]
        self._dead = 0
