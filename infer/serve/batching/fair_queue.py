"""A queue of tensors that several API keys share: equal service, and a part of the places for each.

Each tenant has a counter of the seconds it was served, as `Speed` predicts them for its rows. The tenant with the
lowest counter is next, within a batch too, whatever priority others ask for; one that comes back starts at the lowest
counter of those that wait, so that nobody saves up service while it asks for nothing. (Virtual token counters: Sheng et
al., Fairness in serving large language models, OSDI 2024, with predicted seconds for tokens.) Within a tenant the order
is that of `WaitingItems`. A batch is filled as far as work fits: shares only matter while more waits than fits.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain
from typing import Any

from ...llm.engine.quota import is_beyond_share
from .admission import LOWEST_PRIORITY, AdmissionController
from .deadline_budget import FairDeadlineBudget, HeapEntry
from .queue import LOOK_PAST, BatchFill, BatchQueue, NextBatch
from .queue_items import QueueItem
from .waiting_items import WaitingItems

UNMEASURED = 1e-9  # seconds of one element, before the first batch was measured
MOST_BEHIND = 2  # longest batches that a tenant may have had more than another that waits too


class TenantQueue(WaitingItems):
    """The entries of one tenant; `served`: its counter, in seconds above those it missed while it asked for nothing."""

    def __init__(self, name: str, whole: FairBatchQueue) -> None:
        super().__init__(whole.clock, whole.latency)
        self.name, self.whole, self.served = name, whole, 0.0
        self.work = 0  # of what waits, as `Speed` counts it
        self.admission = AdmissionController(whole, self)

    @property
    def total_requests(self) -> int:
        return self.whole.requests

    def ahead(self, priority: int = LOWEST_PRIORITY, deadline: float | None = None) -> tuple[float, float]:
        """Rows and work that go before new work of this tenant: its own, and of each other tenant at most as much."""
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
        """Why there is no place for so much more of this tenant; who has less than its part still finds one."""
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

    def head(self, kind: Hashable, now: float, expired: list[QueueItem]) -> HeapEntry | None:
        """The most urgent entry of a kind that can be in time; those before it that can't be are let go."""
        queue = self._queues.get(kind)
        while queue:
            item = queue[0][3]
            if not item.waiting:
                self._dead -= 1
            elif self._cannot_finish(item, now, alone=self.total_requests == 1):
                self._leave(item)
                expired.append(item)
            else:
                return queue[0]
            heapq.heappop(queue)
        self._queues.pop(kind, None)
        return None

    def pop(self, kind: Hashable) -> HeapEntry:
        queue = self._queues[kind]
        heap_entry = heapq.heappop(queue)
        if not queue:
            del self._queues[kind]
        return heap_entry

    def push(self, heap_entry: HeapEntry) -> None:
        heapq.heappush(self._queues.setdefault(heap_entry[3].key, []), heap_entry)

    def _leave(self, item: QueueItem) -> None:
        super()._leave(item)
        if not self.requests:
            self.whole.rest(self)

    def _count(self, item: QueueItem, sign: int) -> None:
        super()._count(item, sign)
        self.work += sign * item.work
        self.whole.count(item, sign)


class FairBatchQueue(BatchQueue):
    """A `BatchQueue` with a `TenantQueue` for each tenant. Tenants are configured API keys, not clients' names.

    `active`: the tenants that wait, in the order in which they came.
    """

    def __init__(self, *options: Any, **more: Any) -> None:
        super().__init__(*options, **more)
        self.active: dict[str, TenantQueue] = {}
        self._tenant_queues: dict[str, TenantQueue] = {}
        self._last: TenantQueue | None = None  # that was the last to wait for nothing any more

    def tenant_queue(self, tenant: str) -> TenantQueue:
        """That of a tenant, made when it first asks for something."""
        found = self._tenant_queues.get(tenant)
        if found is None:
            found = self._tenant_queues[tenant] = TenantQueue(tenant, self)
        return found

    def admission_for(self, tenant: str) -> AdmissionController:
        return self.tenant_queue(tenant).admission

    @property
    def kinds(self) -> int:
        return len({kind for tenant_queue in self.active.values() for kind in tenant_queue._queues})

    def items(self, without: Hashable = None) -> Iterator[HeapEntry]:
        return chain.from_iterable([tenant_queue.items(without) for tenant_queue in self.active.values()])

    def rest(self, tenant_queue: TenantQueue) -> None:
        """A tenant waits for nothing any more."""
        self.active.pop(tenant_queue.name, None)
        self._last = tenant_queue

    count = WaitingItems._count

    def _enter(self, items: Sequence[QueueItem]) -> None:
        tenant_queue = self.tenant_queue(items[0].tenant)
        if tenant_queue.name not in self.active:
            least = min([other.served for other in self.active.values()], default=None)
            if least is None:
                least = self._last.served if self._last is not None else 0.0
            tenant_queue.served = max(tenant_queue.served, least)
            self.active[tenant_queue.name] = tenant_queue
        tenant_queue._enter(items)

    def cancel(self, item: QueueItem) -> bool:
        return item.waiting and self.tenant_queue(item.tenant).cancel(item)

    def drop(self, item: QueueItem, at: int) -> bool:
        return item.waiting and self.tenant_queue(item.tenant).drop(item, at)

    def clear(self) -> list[QueueItem]:
        return [item for tenant_queue in list(self.active.values()) for item in tenant_queue.clear()]

    def take(self, executor: int = 0) -> NextBatch:
        """The next batch: the most urgent entry of the tenant that was served least, and as much of its kind as fits,
        of each tenant in its turn."""
        taken = NextBatch()
        found = [
            (tenant_queue, tenant_queue._most_urgent(taken.expired))
            for tenant_queue in list(self.active.values())
        ]
        urgent = [(tenant_queue, kind) for tenant_queue, kind in found if kind is not None]
        if not urgent:
            return taken
        _, kind = min(urgent, key=lambda one: one[0].served)
        taken.wait = self._delay(
            [heap_entry for tenant_queue, _ in urgent for heap_entry in tenant_queue._queues.get(kind, ())]
        )
        if taken.wait is None:
            self._fill_fairly(kind, taken)
            self._charge(taken.items, self._run(taken, executor))
        return taken

    def _charge(self, items: Sequence[QueueItem], work: float) -> None:
        """Each tenant pays for its part of the batch. Counters stay close, so that neither what was mispredicted nor
        what others left unused is made up for at length."""
        seconds = self.latency.seconds(work) or UNMEASURED * work
        each = seconds / max(sum([item.work for item in items]), 1)
        for item in items:
            self._tenant_queues[item.tenant].served += each * item.work
        if len(self.active) > 1 and self.latency.longest:
            waiting = self.active.values()
            most = min([tenant_queue.served for tenant_queue in waiting]) + MOST_BEHIND * self.latency.longest
            for tenant_queue in waiting:
                tenant_queue.served = min(tenant_queue.served, most)

    def _fill_fairly(self, kind: Hashable, taken: NextBatch) -> None:
        """As `_fill`, of the tenant that would have the lowest counter each time."""
        filling, now = BatchFill(), self.clock()
        joined: dict[QueueItem, int] = {}  # how many requests of each
        passed: list[tuple[TenantQueue, HeapEntry]] = []
        turns = [
            (tenant_queue.served, number, tenant_queue)
            for number, tenant_queue in enumerate(self.active.values())
            if kind in tenant_queue._queues
        ]
        heapq.heapify(turns)
        rooms = FairDeadlineBudget(self.active.values(), kind, self, now)
        elsewhere = sorted(
            [tenant_queue.served for tenant_queue in self.active.values() if kind not in tenant_queue._queues]
        )

        def room() -> float:
            return rooms.before(tenant_queue, heap_entry, served, next(iter(joined), item).least)

        while turns and filling.rows < self.max_batch and len(passed) < LOOK_PAST:
            served, number, tenant_queue = turns[0]
            head = tenant_queue.head(kind, now, taken.expired)
            if head is None:
                heapq.heappop(turns)
                continue
            heap_entry, item = head, head[3]
            most = left = item.requests - joined.get(item, 0)
            cost = 0.0
            if len(turns) > 1 or elsewhere:
                cost = self._cost(item)
                later = elsewhere[bisect.bisect_left(elsewhere, served) :][:1]
                others = [turn[0] for turn in turns[1:3]] + later
                most = min(left, 1 + int((min(others) - served) / cost)) if others else left
            fit = self._fit(filling, item, most, now, room)
            if fit:
                joined[item] = joined.get(item, 0) + fit
            if fit == left or fit < most:
                tenant_queue.pop(kind)
            if fit < most:
                passed.append((tenant_queue, heap_entry))
            if cost:
                heapq.heapreplace(turns, (served + fit * cost, number, tenant_queue))
        taken.items = [self._taken(item, count) for item, count in joined.items()]
        for tenant_queue, heap_entry in passed:
            tenant_queue.push(heap_entry)
        taken.reason = self._reason(filling, short=bool(passed))

    def _taken(self, item: QueueItem, count: int) -> QueueItem:
        tenant_queue = self.tenant_queue(item.tenant)
        if count < item.requests:
            item = item.take(count)
        tenant_queue._leave(item)
        return item

    def _cost(self, item: QueueItem) -> float:
        """Seconds of one of its requests, in a full batch."""
        elements = max(item.elements, 1)
        full = elements * max(min(self.max_batch, self.limits.max_batch_elements // elements), 1)
        return item.least * (self.latency.seconds(full) / full or UNMEASURED)
