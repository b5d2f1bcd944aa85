"""Waiting items of one tenant of a fair queue, and its share of the queue's limits."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Protocol

from ...llm.engine.scheduling.engine_limits import is_beyond_share
from .admission import AdmissionController
from .queue_items import LOWEST_PRIORITY, HeapEntry, QueueItem
from .urgency_heaps import QueueState, UrgencyHeaps


class SharedQueue(QueueState, Protocol):
    """State of the whole queue that its tenants read, and its calls when their items change."""

    active: dict[str, TenantQueue]
    rows: int
    bytes: int

    def deactivate(self, part: TenantQueue) -> None: ...

    def count(self, item: QueueItem, sign: int) -> None: ...


class TenantQueue(UrgencyHeaps):
    """Waiting items of one tenant; `served`: its service counter, in predicted seconds."""

    def __init__(self, name: str, whole: SharedQueue) -> None:
        super().__init__(whole.clock, whole.latency)
        self.name, self.whole, self.served = name, whole, 0.0
        self.work = 0.0  # waiting, as `LatencyModel` counts it
        self.admission = AdmissionController(whole, self)

    @property
    def total_requests(self) -> int:
        return self.whole.requests

    def ahead(self, priority: int = LOWEST_PRIORITY, deadline: float | None = None) -> tuple[float, float]:
        """Return rows and work ahead of new work of this tenant: its own, and at most as much of each other tenant."""
        rows, work = super().ahead(priority, deadline)
        before, active = work, self.whole.active
        if not before or (len(active) == 1 and self.requests):
            return rows, work
        for other in active.values():
            if other is not self:
                theirs = other.work
                if theirs <= before:
                    rows, work = rows + other.rows, work + theirs
                else:
                    rows, work = rows + before / theirs * other.rows, work + before
        return rows, work

    def full(self, requests: int, rows: int, size: int) -> str:
        """Describe the queue limit that further work would exceed; "" if none, or below the tenant's share."""
        whole, limits = self.whole, self.whole.limits
        if (
            whole.requests + requests <= limits.max_queue_requests
            and whole.rows + rows <= limits.max_queue_rows
            and whole.bytes + size <= limits.max_queue_bytes
        ):
            return ""
        tenants = len(whole.active) + (self.name not in whole.active)
        for what, own, total, more, limit in (
            ("requests", self.requests, whole.requests, requests, limits.max_queue_requests),
            ("rows", self.rows, whole.rows, rows, limits.max_queue_rows),
            ("bytes", self.bytes, whole.bytes, size, limits.max_queue_bytes),
        ):
            if is_beyond_share(own + more, total + more, tenants, limit):
                if (own + more) * tenants <= limit:
                    return f"the queue holds {total} {what}, twice its limit"
                share = limit // tenants
                return (
                    f"the queue holds {total} {what}, {own} of them of this API key, whose share is {share}"
                )
        return ""

    def first_viable(self, kind: Hashable, now: float, expired: list[QueueItem]) -> HeapEntry | None:
        """Return the most urgent item of a batch key that can meet its deadline; move those before it to `expired`."""
        queue = self._queues.get(kind)
        while queue:
            item = queue[0][3]
            if not item.waiting:
                self._dead -= 1
            elif self._cannot_finish(item, now, alone=self.total_requests == 1):
                self._remove(item)
                expired.append(item)
            else:
                return queue[0]
            heapq.heappop(queue)
        self._queues.pop(kind, None)
        return None

    def pop(self, kind: Hashable) -> HeapEntry:
        queue = self._queues[kind]
        entry = heapq.heappop(queue)
        if not queue:
            del self._queues[kind]
        return entry

    def push(self, entry: HeapEntry) -> None:
        heapq.heappush(self._queues.setdefault(entry[3].key, []), entry)

    def _remove(self, item: QueueItem) -> None:
        super()._remove(item)
        if not self.requests:
            self.whole.deactivate(self)

    def _count(self, item: QueueItem, sign: int) -> None:
        super()._count(item, sign)
        self.work += sign * item.work
        self.whole.count(item, sign)
