"""Batch queue shared fairly by several API keys: equal service, and a share of the queue for each.

Each tenant has a counter of the seconds it was served, as `LatencyModel` predicts them for its rows. The tenant with
the lowest counter is next, within a batch too, whatever the priorities of others; one that comes back starts at the
lowest counter of those that wait, so that an idle tenant saves up no service. (Virtual token counters: Sheng et al.,
Fairness in serving large language models, OSDI 2024, with predicted seconds for tokens.) Within a tenant the order is
that of `UrgencyHeaps`. A batch is filled as far as work fits: shares only matter while more waits than fits.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain
from typing import Any

from .admission import AdmissionController, FairDeadlineBudget
from .batch_queue import LOOK_PAST, BatchQueue
from .queue_items import HeapEntry, NextBatch, QueueItem
from .tenant_queue import TenantQueue
from .urgency_heaps import UrgencyHeaps

UNMEASURED = 1e-9  # seconds of one element before the first measured batch
MOST_BEHIND = 2  # longest batches that a tenant may have had more than another that waits too


class FairBatchQueue(BatchQueue):
    """A `BatchQueue` with a `TenantQueue` for each tenant. Tenants are configured API keys, not clients' names.

    `active`: tenants with waiting items, in order of arrival.
    """

    def __init__(self, *options: Any, **more: Any) -> None:
        super().__init__(*options, **more)
        self.active: dict[str, TenantQueue] = {}
        self._tenant_queues: dict[str, TenantQueue] = {}
        self._last: TenantQueue | None = None  # tenant whose items ran out last

    def tenant_queue(self, tenant: str) -> TenantQueue:
        """Return the queue of a tenant; made at its first request."""
        found = self._tenant_queues.get(tenant)
        if found is None:
            found = self._tenant_queues[tenant] = TenantQueue(tenant, self)
        return found

    def admission_for(self, tenant: str) -> AdmissionController:
        return self.tenant_queue(tenant).admission

    @property
    def kinds(self) -> int:
        return len({kind for part in self.active.values() for kind in part._queues})

    def items(self, without: Hashable = None) -> Iterator[HeapEntry]:
        return chain.from_iterable([part.items(without) for part in self.active.values()])

    def deactivate(self, part: TenantQueue) -> None:
        """Note that a tenant has no waiting items."""
        self.active.pop(part.name, None)
        self._last = part

    count = UrgencyHeaps._count

    def _insert(self, items: Sequence[QueueItem]) -> None:
        part = self.tenant_queue(items[0].tenant)
        if part.name not in self.active:
            least = min([other.served for other in self.active.values()], default=None)
            if least is None:
                least = self._last.served if self._last is not None else 0.0
            part.served = max(part.served, least)
            self.active[part.name] = part
        part._insert(items)

    def cancel(self, item: QueueItem) -> bool:
        return item.waiting and self.tenant_queue(item.tenant).cancel(item)

    def drop(self, item: QueueItem, at: int) -> bool:
        return item.waiting and self.tenant_queue(item.tenant).drop(item, at)

    def clear(self) -> list[QueueItem]:
        return [item for part in list(self.active.values()) for item in part.clear()]

    def take(self, executor: int = 0) -> NextBatch:
        """Form the next batch: the most urgent item of the tenant served least, then others of its key."""
        taken = NextBatch()
        found = [(part, part._most_urgent(taken.expired)) for part in list(self.active.values())]
        urgent = [(part, kind) for part, kind in found if kind is not None]
        if not urgent:
            return taken
        _, kind = min(urgent, key=lambda one: one[0].served)
        taken.wait = self._delay([entry for part, _ in urgent for entry in part._queues.get(kind, ())])
        if taken.wait is None:
            self._fill_fairly(kind, taken)
            self._charge(taken.items, self._run(taken, executor))
        return taken

    def _charge(self, items: Sequence[QueueItem], work: float) -> None:
        """Charge each tenant for its part of the batch.

        Counters stay within `MOST_BEHIND` batches of each other, so that neither mispredictions nor capacity that
        others left unused are compensated at length.
        """
        seconds = self.latency.seconds(work) or UNMEASURED * work
        each = seconds / max(sum([item.work for item in items]), 1)
        for item in items:
            self._tenant_queues[item.tenant].served += each * item.work
        if len(self.active) > 1 and self.latency.longest:
            waiting = self.active.values()
            most = min([part.served for part in waiting]) + MOST_BEHIND * self.latency.longest
            for part in waiting:
                part.served = min(part.served, most)

    def _fill_fairly(self, kind: Hashable, taken: NextBatch) -> None:
        """Fill the batch as `_fill` does, each time from the tenant that would have the lowest counter."""
        fill, now = self._new_fill(), self.clock()
        joined: dict[QueueItem, int] = {}  # item → number of its requests in the batch
        passed: list[tuple[TenantQueue, HeapEntry]] = []
        turns = [
            (part.served, number, part)
            for number, part in enumerate(self.active.values())
            if kind in part._queues
        ]
        heapq.heapify(turns)
        budget = FairDeadlineBudget(self.active.values(), kind, self, now)
        elsewhere = sorted([part.served for part in self.active.values() if kind not in part._queues])

        def max_work() -> float:
            return budget.max_work(part, entry, served, next(iter(joined), item).work_per_request)

        while turns and not self._filled(fill) and len(passed) < LOOK_PAST:
            served, number, part = turns[0]
            head = part.first_viable(kind, now, taken.expired)
            if head is None:
                heapq.heappop(turns)
                continue
            entry, item = head, head[3]
            most = left = item.requests - joined.get(item, 0)
            cost = 0.0
            if len(turns) > 1 or elsewhere:
                cost = self._cost(item)
                later = elsewhere[bisect.bisect_left(elsewhere, served) :][:1]
                others = [turn[0] for turn in turns[1:3]] + later
                most = min(left, 1 + int((min(others) - served) / cost)) if others else left
            fit = self._fit(fill, item, most, now, max_work)
            if fit:
                joined[item] = joined.get(item, 0) + fit
            if fit == left or fit < most:
                part.pop(kind)
            if fit < most:
                passed.append((part, entry))
            if cost:
                heapq.heapreplace(turns, (served + fit * cost, number, part))
        taken.items = [self._taken(item, count) for item, count in joined.items()]
        for part, entry in passed:
            part.push(entry)
        taken.reason = self._reason(fill, short=bool(passed))

    def _taken(self, item: QueueItem, count: int) -> QueueItem:
        part = self.tenant_queue(item.tenant)
        if count < item.requests:
            item = item.take(count)
        part._remove(item)
        return item

    def _cost(self, item: QueueItem) -> float:
        """Return the predicted seconds of one request of the item in a full batch."""
        elements = max(item.elements, 1)
        full = item.work_per_row * max(min(self.max_batch, self.limits.max_batch_elements // elements), 1)
        return item.work_per_request * (self.latency.seconds(full) / full or UNMEASURED)
