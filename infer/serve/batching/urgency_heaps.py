"""Waiting queue items of one tenant or of all: one heap by urgency for each batch key."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol

from ..limits import ServeLimits
from .latency_model import LatencyModel
from .queue_items import LOWEST_PRIORITY, HeapEntry, QueueItem

AGING = 2.0  # seconds of waiting that outweigh one step of priority, so that no item starves


class UrgencyHeaps:
    """Queue items by batch key and urgency; `requests`, `rows` and `bytes` are totals. Not thread-safe."""

    def __init__(self, clock: Callable[[], float], latency: LatencyModel) -> None:
        self.clock, self.latency = clock, latency
        self.requests = self.rows = self.bytes = 0
        self._queues: dict[Hashable, list[HeapEntry]] = {}
        self._waiting: dict[int, tuple[int, float]] = {}  # priority → rows and work
        self._order = itertools.count()
        self._dead = 0  # heap entries of items that wait no more

    @property
    def kinds(self) -> int:
        """Number of batch keys that wait; items of two keys cannot share a batch."""
        return len(self._queues)

    @property
    def total_requests(self) -> int:
        """Number of waiting requests, other tenants' included."""
        return self.requests

    def items(self, without: Hashable = None) -> Iterator[HeapEntry]:
        """Iterate over the heap entries of waiting items, except those of one batch key."""
        queues = [queue for kind, queue in self._queues.items() if kind != without]
        return (entry for queue in queues for entry in queue if entry[3].waiting)

    def ahead(self, priority: int = LOWEST_PRIORITY, deadline: float | None = None) -> tuple[float, float]:
        """Return rows and work of waiting items that go before new work of this priority and deadline.

        Without a deadline all waiting work of the priority counts as ahead.
        """
        rows, work = 0, 0.0
        if deadline is None:
            for urgency, (item_rows, item_work) in self._waiting.items():
                if urgency <= priority:
                    rows, work = rows + item_rows, work + item_work
            return rows, work
        mine = self._urgency(priority), deadline
        for entry in self.items():
            if entry[:2] <= mine:
                item = entry[3]
                rows, work = rows + item.rows, work + item.work
        return rows, work

    def _insert(self, items: Sequence[QueueItem]) -> None:
        now = self.clock()
        for item in items:
            item.arrived, item.waiting = now, True
            queue = self._queues.setdefault(item.key, [])
            urgency = self._urgency(item.priority)
            heapq.heappush(queue, (urgency, item.deadline, next(self._order), item))
            self._count(item, 1)

    def _urgency(self, priority: int) -> int:
        """Return the sort key of an item that arrives now: priority plus arrival time in steps of `AGING`."""
        return priority + int(self.clock() / AGING)

    def cancel(self, item: QueueItem) -> bool:
        """Remove an item and release its arrays; return False if it does not wait (it runs, or has ended)."""
        if not item.waiting:
            return False
        self._remove(item)
        item.inputs, item.owner = {}, None
        self._dead += 1
        if self._dead > max(64, self.requests):
            self._drop_removed()
        return True

    def drop(self, item: QueueItem, at: int) -> bool:
        """Remove request number `at` from an item; return False if the item does not wait."""
        if item.requests == 1:
            return self.cancel(item)
        if item.waiting:
            self._count(item, -1)
            item.drop(at)
            self._count(item, 1)
        return item.waiting

    def clear(self) -> list[QueueItem]:
        """Remove and return all items."""
        items = [entry[3] for entry in self.items()]
        for item in items:
            self._remove(item)
        self._queues.clear()
        return items

    def _most_urgent(self, expired: list[QueueItem]) -> Hashable | None:
        """Return the batch key of the most urgent item; move items that cannot meet their deadline to `expired`."""
        now, best, chosen = self.clock(), None, None
        for key in list(self._queues):
            queue = self._queues[key]
            while queue and (
                not queue[0][3].waiting
                or self._cannot_finish(queue[0][3], now, alone=self.total_requests == 1)
            ):
                item = queue[0][3]
                if item.waiting and self.total_requests == item.requests > 1 and item.deadline > now:
                    item = item.take(item.requests - 1)  # the last request is tried: see `_cannot_finish`
                else:
                    heapq.heappop(queue)
                if item.waiting:
                    self._remove(item)
                    expired.append(item)
                else:
                    self._dead -= 1
            if not queue:
                del self._queues[key]
            elif best is None or queue[0][:3] < best:
                best, chosen = queue[0][:3], key
        return chosen

    def _cannot_finish(self, item: QueueItem, now: float, *, alone: bool) -> bool:
        """Return True if the deadline has passed, or would pass before one request of the item is done.

        An item that is `alone` in the queue is run although it is predicted to be late: it delays no other request,
        and its run corrects a latency model that is out of date.
        """
        return item.deadline <= now + (0.0 if alone else self.latency.seconds(item.work_per_request))

    def _remove(self, item: QueueItem) -> None:
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

    def _drop_removed(self) -> None:
        """Remove heap entries of items that wait no more."""
        for key, queue in list(self._queues.items()):
            self._queues[key] = alive = [entry for entry in queue if entry[3].waiting]
            heapq.heapify(alive)
            if not alive:
                del self._queues[key]
        self._dead = 0


class QueueState(Protocol):
    """State of the whole queue of one model that admission and batch formation read. Times are `clock` seconds."""

    limits: ServeLimits
    latency: LatencyModel
    max_batch: int
    num_executors: int
    draining: bool
    requests: int
    running: dict[int, tuple[float, float]]  # executor → work of its batch, start time
    finished: float  # time of the last measured batch

    @property
    def clock(self) -> Callable[[], float]: ...

    @property
    def kinds(self) -> int: ...


class WaitingState(Protocol):
    """Waiting items that one admission controller counts: those of one tenant, or all."""

    requests: int

    def ahead(self, priority: int = ..., deadline: float | None = None) -> tuple[float, float]: ...

    def full(self, requests: int, rows: int, size: int) -> str: ...


class TenantState(Protocol):
    """Waiting items of one tenant and its service counter, in seconds."""

    name: str
    served: float

    def items(self, without: Any = None) -> Iterator[HeapEntry]: ...
