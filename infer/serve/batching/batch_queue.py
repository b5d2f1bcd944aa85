"""Queue of one tensor model, and formation of its batches. No threads, no sleeping, any clock.

Batches are not delayed by default: when an executor is free, the most urgent item is taken and the batch is filled with
others of its key. `tensor_engine` has the threads that run them.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..limits import ServeLimits
from .admission import AdmissionController, DeadlineBudget
from .latency_model import LatencyModel
from .queue_items import HeapEntry, NextBatch, QueueItem
from .urgency_heaps import UrgencyHeaps

LOOK_PAST = 16  # items that do not fit and may be overtaken while a batch is filled
LARGEST_SHARE = 1 / 3  # of the waiting work that one batch without padding may have beyond the useful work


@dataclass(slots=True)
class BatchFill:
    """State of a batch while it is filled.

    `widest`: elements of a row; `work`: of its items, without padding; `bound`: most work with which its items meet
    their deadlines; `enough`: work beyond which it takes no more items; `short`: reason to end it while more wait.
    """

    rows: int = 0
    widest: int = 1
    work: float = 0.0
    bound: float = math.inf
    enough: float = math.inf
    short: str = "full"


class BatchQueue(UrgencyHeaps):
    """Queue bounded in requests, rows, bytes and predicted wait; gives batches. Not thread-safe.

    `num_executors`: batches that run at a time; executors are numbered from 0. `packed`: the model computes no padding,
    so that the work of a batch is the sum of its items' work; else it is rows x elements of the widest row.
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
        super().__init__(clock, LatencyModel())
        self.packed = packed
        self.max_batch, self.limits, self.num_executors = max_batch, limits, num_executors
        self.admission = AdmissionController(self, self)
        self.draining = False
        self.running: dict[int, tuple[float, float]] = {}  # executor → work of its batch, start time
        self.finished = -math.inf  # time of the last measured batch

    def admission_for(self, tenant: str) -> AdmissionController:
        """Return the admission controller of a tenant; this queue has one for all."""
        return self.admission

    def full(self, requests: int, rows: int, size: int) -> str:
        """Describe the queue limit that further work would exceed; "" if none."""
        limits = self.limits
        if self.requests + requests > limits.max_queue_requests:
            return f"the queue holds {self.requests} requests"
        if self.rows + rows > limits.max_queue_rows or self.bytes + size > limits.max_queue_bytes:
            return f"the queue holds {self.rows} rows, {self.bytes} bytes"
        return ""

    def admit(self, items: Sequence[QueueItem], deadline: float) -> None:
        """Queue all items or none. Raises as `AdmissionController.admit`."""
        self.admission_for(items[0].tenant).admit(items, deadline)
        self._insert(items)

    def admit_group(self, item: QueueItem, deadline: float) -> bool:
        """Queue an item of several requests, or return False; see `AdmissionController.admit_group`."""
        entered = self.admission_for(item.tenant).admit_group(item, deadline)
        if entered:
            self._insert([item])
        return entered

    def take(self, executor: int = 0) -> NextBatch:
        """Form the next batch: the most urgent item by (priority and age, deadline), and others of its key that fit."""
        taken = NextBatch()
        key = self._most_urgent(taken.expired)
        if key is None:
            return taken
        queue = self._queues[key]
        taken.wait = self._delay(queue)
        if taken.wait is not None:
            return taken
        self._fill(queue, taken)
        if not queue:
            del self._queues[key]
        self._run(taken, executor)
        return taken

    def _run(self, taken: NextBatch, executor: int) -> float:
        """Record the start of a batch; return its work."""
        if not taken.items:
            return 0.0
        if self.packed:
            work = sum([e.work for e in taken.items])
        else:
            work = sum([e.rows for e in taken.items]) * max([1, *[e.elements for e in taken.items]])
        self.running[executor] = work, self.clock()
        return work

    def finish(self, seconds: float, executor: int = 0) -> None:
        """Record that an executor's batch ended after `seconds`; 0 if the time is not to be learned from."""
        work, _ = self.running.pop(executor, (0, 0.0))
        if work and seconds > 0:
            self.finished = self.clock()
            self.latency.observe(work, seconds)

    def _delay(self, queue: list[HeapEntry]) -> float | None:
        """Return the seconds that a batch below `max_batch` rows may still wait for more; None to run it now."""
        delay = self.limits.max_delay_us / 1e6
        if not delay or self.draining:
            return None
        waiting = [entry[3] for entry in queue if entry[3].waiting]
        left = min(item.arrived for item in waiting) + delay - self.clock()
        return left if left > 0 and sum(item.rows for item in waiting) < self.max_batch else None

    def _fill(self, queue: list[HeapEntry], taken: NextBatch) -> None:
        """Move items into the batch as far as they fit and no feasible deadline is missed; others keep their place."""
        fill, passed = self._new_fill(), list[HeapEntry]()
        now, kind, budget = self.clock(), queue[0][3].key, None

        def max_work() -> float:
            nonlocal budget
            if budget is None:  # made for the first item that shares a batch: a lone item needs none
                least = (taken.items or [item])[0].work_per_request
                budget = DeadlineBudget(self.items(kind), self, now, least)
            return budget.max_work(entry[:2])

        while queue and not self._filled(fill) and len(passed) < LOOK_PAST:
            entry = heapq.heappop(queue)
            item = entry[3]
            if not item.waiting:
                self._dead -= 1
                continue
            if self._cannot_finish(item, now, alone=not fill.rows and self.requests == 1):
                self._remove(item)
                taken.expired.append(item)
                continue
            fit = self._fit(fill, item, item.requests, now, max_work)
            if fit < item.requests:
                passed.append(entry)
                if not fit:
                    continue
                item = item.take(fit)
            self._remove(item)
            taken.items.append(item)
        for entry in passed:
            heapq.heappush(queue, entry)
        taken.reason = self._reason(fill, short=bool(passed))

    def _new_fill(self) -> BatchFill:
        """Return an empty batch.

        Without padding a batch of more than the useful work gains no throughput, and its first items wait for its last:
        then a batch ends there, or at a share of what waits.
        """
        if not self.packed:
            return BatchFill()
        return BatchFill(enough=max(self.latency.useful_work, self.ahead()[1] * LARGEST_SHARE))

    def _filled(self, fill: BatchFill) -> bool:
        return fill.rows >= self.max_batch or (fill.rows > 0 and fill.work >= fill.enough)

    def _reason(self, fill: BatchFill, *, short: bool) -> str:
        if fill.rows >= self.max_batch or (self.requests and self._filled(fill)):
            return "full"
        return fill.short if short else "idle"

    def _fit(
        self, fill: BatchFill, item: QueueItem, most: int, now: float, max_work: Callable[[], float]
    ) -> int:
        """Add the first requests of an item, at most `most`, to the batch's counts; return how many fit.

        `max_work`: most work with which all items that go before this one meet their deadlines.
        """
        rows, wider, own = fill.rows, max(fill.widest, item.elements), self._in_time(item, now)
        each = item.rows // item.requests
        fit = (min(self.max_batch, self.limits.max_batch_elements // wider) - rows) // each
        fit = min(max(fit, 0 if rows else 1), most)
        if fit and rows:
            fit = min(self._requests_within(fill.enough, fill, item, fit), fit)
        if fit and rows + fit > 1:
            in_time = self._requests_within(min(fill.bound, own, max_work()), fill, item, fit)
            if in_time < fit:
                fill.short = "deadline"
                fit = max(in_time, 0 if rows else 1)
        if fit:
            fill.rows, fill.widest = rows + fit * each, wider
            fill.work += fit * item.work_per_request
            fill.bound = min(fill.bound, own)
        return fit

    def _requests_within(self, work: float, fill: BatchFill, item: QueueItem, most: int) -> int:
        """Return how many requests of the item, at most `most`, may join a batch of at most this work."""
        if self.packed:
            return int(max(min((work - fill.work) / item.work_per_request, most), 0))
        each = item.rows // item.requests
        rows = work / max(fill.widest, item.elements) - fill.rows
        return int(max(min(rows, most * each), 0) // each)

    def _in_time(self, item: QueueItem, now: float) -> float:
        """Return the most work of a batch in which the item meets its deadline.

        With the margin of `caution` if that is possible, else without, else infinite: the item is late in any batch.
        """
        left, latency = item.deadline - now, self.latency
        for seconds in (left, left * latency.caution):
            if (most := latency.work_within(seconds)) >= item.work_per_request:
                return most
        return math.inf
