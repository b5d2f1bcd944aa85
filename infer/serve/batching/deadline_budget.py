"""How large a batch may grow before those who wait for its end could no longer be answered in time."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .fair_queue import TenantQueue
    from .queue import BatchQueue
    from .queue_items import QueueItem

Urgency = tuple[float, float]  # priority, deadline
HeapEntry = tuple[float, float, int, "QueueItem"]


class DeadlineBudget:
    """Those given to `waiting`, entries that can't join a batch which starts `now` and holds `work` at least.

    They are expected to run in the order of urgency, each kind of work in one batch, on as many lanes as there are.
    """

    def __init__(self, waiting: Iterable[HeapEntry], queue: BatchQueue, now: float, work: float) -> None:
        self._waiting = sorted(waiting, key=lambda heap_entry: heap_entry[:3], reverse=True)
        self._latency, self._now, self._num_executors = queue.latency, now, queue.num_executors
        self._least = queue.latency.seconds(work) * queue.latency.caution
        self._kinds, self._work, self._slack = set[Hashable](), 0.0, math.inf

    def room(self, urgency: Urgency) -> float:
        """The most work of that batch with which all who are more urgent will be in time, of those who can be.

        To be asked of ever less urgent ones: whoever is more urgent than all that waits would go first anyway.
        """
        latency = self._latency
        while self._waiting and self._waiting[-1][:2] < urgency:
            item = self._waiting.pop()[3]
            kinds = len(self._kinds | {item.key})
            for _ in range(item.requests):
                work = self._work + item.least
                slack = (
                    item.deadline
                    - self._now
                    - latency.seconds(work, kinds) * latency.caution / self._num_executors
                )
                if slack < self._least:
                    break
                self._kinds.add(item.key)
                self._work, self._slack = work, min(self._slack, slack)
        return latency.work_within(self._slack)


class FairDeadlineBudget:
    """Promises given to several tenants, who fill a batch of one `kind` in the order of their counters."""

    def __init__(
        self, tenant_queues: Iterable[TenantQueue], kind: Hashable, queue: BatchQueue, now: float
    ) -> None:
        self._tenant_queues, self._kind, self._queue, self._now = list(tenant_queues), kind, queue, now
        self._next: list[tuple[TenantQueue, HeapEntry]] | None = None
        self._budgets: dict[str, tuple[DeadlineBudget, DeadlineBudget]] = {}

    def before(self, tenant_queue: TenantQueue, heap_entry: HeapEntry, served: float, work: float) -> float:
        """The most work with which all those are in time that go before an entry: what is more urgent of its tenant,
        and the next of each tenant with a counter below `served`. `work`: as `DeadlineBudget` takes it."""
        if not self._next_of_each():
            return math.inf
        found = self._budgets.get(tenant_queue.name)
        if found is None:
            others = [first for other, first in self._next_of_each() if other is not tenant_queue]
            options = self._queue, self._now, work
            found = DeadlineBudget(tenant_queue.items(self._kind), *options), DeadlineBudget(others, *options)
            self._budgets[tenant_queue.name] = found
        return min(found[0].room(heap_entry[:2]), found[1].room((served, 0.0)))

    def _next_of_each(self) -> list[tuple[TenantQueue, HeapEntry]]:
        """The most urgent entry of each tenant, with its counter for an urgency."""
        if self._next is None:
            self._next = []
            for number, tenant_queue in enumerate(self._tenant_queues):
                first = min(
                    tenant_queue.items(self._kind), default=None, key=lambda heap_entry: heap_entry[:3]
                )
                if first is not None:
                    self._next.append((tenant_queue, (tenant_queue.served, 0.0, number, first[3])))
        return self._next
