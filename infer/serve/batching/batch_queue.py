"""Queue of one tensor model, shared by tenants, and formation of its batches. No threads, no sleeping, any clock.

Batches are not delayed by default: when an executor is free, the most urgent item is taken and the batch is filled with
others of its key. `tensor_engine` runs them.

Each tenant has a counter of the seconds it was served, as `LatencyModel` predicts them for its rows. The tenant with
the lowest counter is next, within a batch too, whatever the priorities of others; one that comes back starts at the
lowest counter of those that wait, so that an idle tenant saves up no service. (Virtual token counters: Sheng et al.,
Fairness in serving large language models, OSDI 2024, with predicted seconds for tokens.) Within a tenant the order is
by (priority and age, deadline). A batch is filled as far as work fits: shares only matter while more waits than fits.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain

from ..limits import ServeLimits
from .latency_model import LatencyModel
from .queue_items import LOWEST_PRIORITY, HeapEntry, NextBatch, QueueItem, Urgency

AGING = 2.0  # seconds of waiting that outweigh one step of priority, so that no item starves
LOOK_PAST = 16  # items that do not fit and may be overtaken while a batch is filled
LARGEST_SHARE = 1 / 3  # of the waiting work that one batch without padding may have beyond the useful work
UNMEASURED = 1e-9  # seconds of one element before the first measured batch
MOST_BEHIND = 2  # longest batches that a tenant may have had more than another that waits too


class TenantQueue:
    """Waiting items of one tenant: one heap by urgency for each batch key.

    `served`: its service counter, in predicted seconds; `requests`, `rows`, `bytes`, `work` are totals.
    """

    def __init__(self, name: str, whole: BatchQueue) -> None:
        self.name, self.whole, self.served = name, whole, 0.0
        self.requests = self.rows = self.bytes = 0
        self.work = 0.0
        self.heaps: dict[Hashable, list[HeapEntry]] = {}
        self._waiting: dict[int, tuple[int, float]] = {}  # priority → rows and work
        self._dead = 0  # heap entries of items that wait no more

    def items(self, without: Hashable = None) -> Iterator[HeapEntry]:
        """Iterate over the heap entries of waiting items, except those of one batch key."""
        heaps = [heap for key, heap in self.heaps.items() if key != without]
        return (entry for heap in heaps for entry in heap if entry[3].waiting)

    def ahead(self, priority: int = LOWEST_PRIORITY, deadline: float | None = None) -> tuple[float, float]:
        """Return rows and work that go before new work of this tenant: its own, and at most as much of each other.

        Without a deadline all its waiting work of the priority counts as ahead.
        """
        rows, work = 0.0, 0.0
        if deadline is None:
            for urgency, (item_rows, item_work) in self._waiting.items():
                if urgency <= priority:
                    rows, work = rows + item_rows, work + item_work
        else:
            mine = self._urgency(priority), deadline
            for entry in self.items():
                if entry[:2] <= mine:
                    rows, work = rows + entry[3].rows, work + entry[3].work
        own, active = work, self.whole.active
        if not own or (len(active) == 1 and self.requests):
            return rows, work
        for other in active.values():
            if other is not self:
                share = own / other.work if other.work > own else 1.0
                rows, work = rows + share * other.rows, work + share * other.work
        return rows, work

    def insert(self, items: Sequence[QueueItem]) -> None:
        now = self.whole.clock()
        for item in items:
            item.arrived, item.waiting = now, True
            self.push((self._urgency(item.priority), item.deadline, next(self.whole.order), item))
            self._count(item, 1)

    def _urgency(self, priority: int) -> int:
        """Return the sort key of an item that arrives now: priority plus arrival time in steps of `AGING`."""
        return priority + int(self.whole.clock() / AGING)

    def cancel(self, item: QueueItem) -> None:
        """Remove a waiting item and release its arrays."""
        self.remove(item)
        item.inputs, item.owner = {}, None
        self._dead += bool(self.requests)
        if self._dead > max(64, self.requests):
            self._drop_dead()

    def drop(self, item: QueueItem, at: int) -> None:
        """Remove request number `at` of several from a waiting item."""
        self._count(item, -1)
        item.drop(at)
        self._count(item, 1)

    def remove(self, item: QueueItem) -> None:
        """Mark an item as one that waits no more."""
        item.waiting = False
        self._count(item, -1)
        if not self.requests:
            for heap in self.heaps.values():
                heap.clear()
            self.heaps.clear()
            self._dead = 0
            self.whole.deactivate(self)

    def most_urgent(self, now: float, expired: list[QueueItem]) -> HeapEntry | None:
        """Return the most urgent item; move those that cannot meet their deadline to `expired`."""
        firsts = [self.first_viable(key, now, expired) for key in list(self.heaps)]
        return min([entry for entry in firsts if entry is not None], default=None)

    def first_viable(self, key: Hashable, now: float, expired: list[QueueItem]) -> HeapEntry | None:
        """Return the most urgent item of a batch key that can meet its deadline; move those before it to `expired`."""
        heap, whole = self.heaps.get(key), self.whole
        while heap:
            item = heap[0][3]
            if item.waiting and not self._cannot_finish(item, now):
                return heap[0]
            if item.waiting and whole.requests == item.requests > 1 and item.deadline > now:
                item = item.take(item.requests - 1)  # the last request is tried: see `_cannot_finish`
            else:
                heapq.heappop(heap)
            if item.waiting:
                self.remove(item)
                expired.append(item)
            else:
                self._dead -= 1
        self.heaps.pop(key, None)
        return None

    def _cannot_finish(self, item: QueueItem, now: float) -> bool:
        """Return True if the deadline has passed, or would pass before one request of the item is done.

        A request alone in the whole queue is run although it is predicted to be late: it delays no other, and its run
        corrects a latency model that is out of date.
        """
        if item.deadline <= now:
            return True
        return item.deadline <= now + self.whole.latency.seconds(item.work_per_request) and (
            self.whole.requests > 1
        )

    def pop(self, key: Hashable) -> None:
        """Remove the first heap entry of a batch key; its item still counts as waiting."""
        heap = self.heaps[key]
        heapq.heappop(heap)
        if not heap:
            del self.heaps[key]

    def push(self, entry: HeapEntry) -> None:
        heapq.heappush(self.heaps.setdefault(entry[3].key, []), entry)

    def _count(self, item: QueueItem, sign: int) -> None:
        whole = self.whole
        requests, rows, size, work = item.requests, sign * item.rows, sign * item.size_bytes, sign * item.work
        self.requests += sign * requests
        self.rows += rows
        self.bytes += size
        self.work = self.work + work if self.requests else 0.0  # no remainder of rounding
        whole.requests += sign * requests
        whole.rows += rows
        whole.bytes += size
        before = self._waiting.get(item.priority, (0, 0.0))
        if before[0] + rows:
            self._waiting[item.priority] = before[0] + rows, before[1] + work
        else:
            self._waiting.pop(item.priority, None)

    def _drop_dead(self) -> None:
        for key, heap in list(self.heaps.items()):
            self.heaps[key] = alive = [entry for entry in heap if entry[3].waiting]
            heapq.heapify(alive)
            if not alive:
                del self.heaps[key]
        self._dead = 0


class BatchQueue:
    """Waiting items of all tenants; gives batches. Not thread-safe. Times are `clock` seconds.

    Tenants are configured API keys, not clients' names; without keys there is one, "". `active`: those with waiting
    items, in order of arrival; `requests`, `rows`, `bytes` are totals. `num_executors`: batches that run at a time;
    executors are numbered from 0. `packed`: the model computes no padding, so that the work of a batch is the sum of
    its items' work; else it is rows x elements of the widest row.
    """

    def __init__(
        self,
        max_batch: int,
        limits: ServeLimits,
        clock: Callable[[], float] = time.monotonic,
        num_executors: int = 1,
        *,
        packed: bool = False,
    ) -> None:
        self.max_batch, self.limits, self.num_executors = max_batch, limits, num_executors
        self.clock, self.latency, self.packed = clock, LatencyModel(), packed
        self.requests = self.rows = self.bytes = 0
        self.active: dict[str, TenantQueue] = {}
        self.tenants: dict[str, TenantQueue] = {}
        self.order = itertools.count()  # of arrival
        self._last: TenantQueue | None = None  # tenant whose items ran out last
        self.draining = False
        self.running: dict[int, tuple[float, float]] = {}  # executor → work of its batch, start time
        self.finished = -math.inf  # time of the last measured batch

    @property
    def kinds(self) -> int:
        """Number of batch keys that wait; items of two keys cannot share a batch."""
        if len(self.active) == 1:
            return len(next(iter(self.active.values())).heaps)
        return len({key for part in self.active.values() for key in part.heaps})

    def tenant(self, name: str) -> TenantQueue:
        """Return the queue of a tenant; made at its first request."""
        part = self.tenants.get(name)
        if part is None:
            part = self.tenants[name] = TenantQueue(name, self)
        return part

    def insert(self, items: Sequence[QueueItem]) -> None:
        """Queue items of one tenant."""
        part = self.tenant(items[0].tenant)
        if part.name not in self.active:
            least = min([other.served for other in self.active.values()], default=None)
            if least is None:
                least = self._last.served if self._last is not None else 0.0
            part.served = max(part.served, least)
            self.active[part.name] = part
        part.insert(items)

    def deactivate(self, part: TenantQueue) -> None:
        """Note that a tenant has no waiting items."""
        self.active.pop(part.name, None)
        self._last = part

    def cancel(self, item: QueueItem) -> bool:
        """Remove an item and release its arrays; return False if it does not wait (it runs, or has ended)."""
        if not item.waiting:
            return False
        self.tenants[item.tenant].cancel(item)
        return True

    def drop(self, item: QueueItem, at: int) -> bool:
        """Remove request number `at` from an item; return False if the item does not wait."""
        if item.requests == 1:
            return self.cancel(item)
        if item.waiting:
            self.tenants[item.tenant].drop(item, at)
        return item.waiting

    def clear(self) -> list[QueueItem]:
        """Remove and return all items."""
        items = [entry[3] for part in self.active.values() for entry in part.items()]
        for item in items:
            self.tenants[item.tenant].remove(item)
        return items

    def take(self, executor: int = 0) -> NextBatch:
        """Form the next batch: the most urgent item of the tenant served least, then others of its key."""
        taken, now = NextBatch(), self.clock()
        least: TenantQueue | None = None
        key: Hashable = None
        for part in list(self.active.values()):
            entry = part.most_urgent(now, taken.expired)
            if entry is not None and (least is None or part.served < least.served):
                least, key = part, entry[3].key
        if least is None:
            return taken
        taken.wait = self._delay(key)
        if taken.wait is None:
            BatchFormation(self, key, now).fill(taken)
            self._start(taken.items, executor)
        return taken

    def _delay(self, key: Hashable) -> float | None:
        """Return the seconds that a batch below `max_batch` rows may still wait for more; None to run it now."""
        delay = self.limits.max_delay_us / 1e6
        if not delay or self.draining:
            return None
        entries = chain.from_iterable(part.heaps.get(key, ()) for part in self.active.values())
        waiting = [entry[3] for entry in entries if entry[3].waiting]
        left = min(item.arrived for item in waiting) + delay - self.clock()
        return left if left > 0 and sum(item.rows for item in waiting) < self.max_batch else None

    def _start(self, items: Sequence[QueueItem], executor: int) -> None:
        """Record the start of a batch, and charge each tenant for its part of it.

        Counters stay within `MOST_BEHIND` batches of each other, so that neither mispredictions nor capacity that
        others left unused are compensated at length.
        """
        if not items:
            return
        total = work = sum([item.work for item in items])
        if not self.packed:
            work = sum([item.rows for item in items]) * max([1, *[item.elements for item in items]])
        self.running[executor] = work, self.clock()
        seconds = self.latency.seconds(work) or UNMEASURED * work
        if len(self.tenants) == 1:
            self.tenants[items[0].tenant].served += seconds
            return
        for item in items:
            self.tenants[item.tenant].served += seconds * item.work / total
        if len(self.active) > 1 and self.latency.longest:
            waiting = self.active.values()
            most = min([part.served for part in waiting]) + MOST_BEHIND * self.latency.longest
            for part in waiting:
                part.served = min(part.served, most)

    def finish(self, seconds: float, executor: int = 0) -> None:
        """Record that an executor's batch ended after `seconds`; 0 if the time is not to be learned from."""
        work, _ = self.running.pop(executor, (0, 0.0))
        if work and seconds > 0:
            self.finished = self.clock()
            self.latency.observe(work, seconds)


class BatchFormation:
    """Batch of one key while it is filled, each time from the tenant that would have the lowest counter.

    `widest`: elements of a row; `work`: of its items, without padding; `bound`: most work with which its items meet
    their deadlines; `enough`: work beyond which it takes no more items; `short`: reason to end it while more wait;
    `joined`: item → number of its requests in the batch.
    """

    def __init__(self, queue: BatchQueue, key: Hashable, now: float) -> None:
        self.queue, self.key, self.now = queue, key, now
        self.rows, self.widest, self.work = 0, 1, 0.0
        self.bound = self.enough = math.inf
        if (
            queue.packed
        ):  # more than the useful work gains no throughput, and the first items wait for the last
            waiting = sum([part.work for part in queue.active.values()])
            self.enough = max(queue.latency.useful_work, waiting * LARGEST_SHARE)
        self.short = "full"
        self.joined: dict[QueueItem, int] = {}
        self._budgets: dict[str, DeadlineBudget] = {}
        self._firsts: list[tuple[float, QueueItem]] | None = None

    @property
    def full(self) -> bool:
        return self.rows >= self.queue.max_batch or (self.rows > 0 and self.work >= self.enough)

    def fill(self, taken: NextBatch) -> None:
        """Move items into the batch as far as they fit and no feasible deadline is missed; others keep their place."""
        key, now, joined = self.key, self.now, self.joined
        passed: list[tuple[TenantQueue, HeapEntry]] = []
        active = self.queue.active.values()
        turns = [(part.served, number, part) for number, part in enumerate(active) if key in part.heaps]
        heapq.heapify(turns)
        elsewhere = sorted([part.served for part in active if key not in part.heaps])
        while turns and not self.full and len(passed) < LOOK_PAST:
            served, number, part = turns[0]
            entry = part.first_viable(key, now, taken.expired)
            if entry is None:
                heapq.heappop(turns)
                continue
            item, cost = entry[3], 0.0
            most = left = item.requests - joined.get(item, 0)
            if len(turns) > 1 or elsewhere:
                cost = self._cost(item)
                later = elsewhere[bisect.bisect_left(elsewhere, served) :][:1]
                others = [turn[0] for turn in turns[1:3]] + later
                most = min(left, 1 + int((min(others) - served) / cost)) if others else left
            fit = self._fit(part, entry, most, served)
            if fit:
                joined[item] = joined.get(item, 0) + fit
            if fit == left or fit < most:
                part.pop(key)
            if fit < most:
                passed.append((part, entry))
            if cost:
                heapq.heapreplace(turns, (served + fit * cost, number, part))
        for item, count in joined.items():
            taken.items.append(item.take(count) if count < item.requests else item)
            self.queue.tenants[item.tenant].remove(taken.items[-1])
        for part, entry in passed:
            part.push(entry)
        taken.reason = self.short if passed else "idle"
        if self.rows >= self.queue.max_batch or (self.queue.requests and self.full):
            taken.reason = "full"

    def _cost(self, item: QueueItem) -> float:
        """Return the predicted seconds of one request of the item in a full batch."""
        queue = self.queue
        rows = min(queue.max_batch, queue.limits.max_batch_elements // max(item.elements, 1))
        full = item.row_work * max(rows, 1)
        return item.work_per_request * (queue.latency.seconds(full) / full or UNMEASURED)

    def _fit(self, part: TenantQueue, entry: HeapEntry, most: int, served: float) -> int:
        """Add the first requests of an item, at most `most`, to the batch's counts; return how many fit.

        `served`: counter of its tenant after its items that joined before.
        """
        queue, item = self.queue, entry[3]
        rows, wider, own = self.rows, max(self.widest, item.elements), self._in_time(item)
        each = item.rows // item.requests
        fit = (min(queue.max_batch, queue.limits.max_batch_elements // wider) - rows) // each
        fit = min(max(fit, 0 if rows else 1), most)
        if fit and rows:
            fit = min(self._requests_within(self.enough, item, fit), fit)
        if fit and rows + fit > 1:  # a lone request delays no more than it must
            budget = self._budget(part, item).max_work(entry[:2], served)
            in_time = self._requests_within(min(self.bound, own, budget), item, fit)
            if in_time < fit:
                self.short = "deadline"
                fit = max(in_time, 0 if rows else 1)
        if fit:
            self.rows, self.widest = rows + fit * each, wider
            self.work += fit * item.work_per_request
            self.bound = min(self.bound, own)
        return fit

    def _budget(self, part: TenantQueue, item: QueueItem) -> DeadlineBudget:
        budget = self._budgets.get(part.name)
        if budget is None:
            if self._firsts is None:
                parts = self.queue.active.values()
                firsts = [(part.served, min(part.items(self.key), default=None)) for part in parts]
                self._firsts = [(served, first[3]) for served, first in firsts if first is not None]
                self._firsts.sort(key=lambda first: first[0], reverse=True)
            others = [first for first in self._firsts if first[1].tenant != part.name]
            least = next(iter(self.joined), item).work_per_request
            budget = DeadlineBudget(self.queue, part.items(self.key), others, self.now, least)
            self._budgets[part.name] = budget
        return budget

    def _requests_within(self, work: float, item: QueueItem, most: int) -> int:
        """Return how many requests of the item, at most `most`, may join a batch of at most this work."""
        if self.queue.packed:
            return int(max(min((work - self.work) / item.work_per_request, most), 0))
        each = item.rows // item.requests
        rows = work / max(self.widest, item.elements) - self.rows
        return int(max(min(rows, most * each), 0) // each)

    def _in_time(self, item: QueueItem) -> float:
        """Return the most work of a batch in which the item meets its deadline.

        With the margin of `caution` if that is possible, else without, else infinite: the item is late in any batch.
        """
        left, latency = item.deadline - self.now, self.queue.latency
        for seconds in (left, left * latency.caution):
            if (most := latency.work_within(seconds)) >= item.work_per_request:
                return most
        return math.inf


class DeadlineBudget:
    """Time that a batch may take before items that cannot join it, but go before it, miss their deadlines.

    `own`: waiting items of one tenant; `others`: counter and most urgent item of each other tenant, the lowest counter
    last. The batch starts `now` and holds at least `work`. Those that go before it are expected to run after it one by
    one, each batch key in one batch, on all executors.
    """

    def __init__(
        self,
        queue: BatchQueue,
        own: Iterable[HeapEntry],
        others: list[tuple[float, QueueItem]],
        now: float,
        work: float,
    ) -> None:
        self._own, self._others = sorted(own, reverse=True), others
        self._latency, self._now, self._num_executors = queue.latency, now, queue.num_executors
        self._least = queue.latency.seconds(work) * queue.latency.caution
        self._kinds, self._work, self._slack = set[Hashable](), 0.0, math.inf

    def max_work(self, urgency: Urgency, served: float) -> float:
        """Return the most work with which more urgent items, and others of tenants with a lower counter, are in time.

        Call with ever less urgent values and ever higher counters: items are consumed.
        """
        while self._own and self._own[-1][:2] < urgency:
            self._count(self._own.pop()[3])
        while self._others and self._others[-1][0] < served:
            self._count(self._others.pop()[1])
        return self._latency.work_within(self._slack)

    def _count(self, item: QueueItem) -> None:
        """Lower the slack to that of an item; one that misses its deadline in any case does not count."""
        latency, kinds = self._latency, len(self._kinds | {item.key})
        for _ in range(item.requests):
            work = self._work + item.work_per_request
            seconds = latency.seconds(work, kinds) * latency.caution / self._num_executors
            slack = item.deadline - self._now - seconds
            if slack < self._least:
                break
            self._kinds.add(item.key)
            self._work, self._slack = work, min(self._slack, slack)
