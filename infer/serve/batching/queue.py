"""The queue and the rule by which batches are made of it. No threads, no sleeping, any clock.

It never waits by default: when the executor is free, the most urgent request is taken and the batch filled
with others of its key. See `engine` for the thread that runs them.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..limits import ServeLimits
from .admission import AdmissionController
from .deadline_budget import DeadlineBudget, HeapEntry
from .latency_model import LatencyModel
from .queue_items import QueueItem
from .waiting_items import WaitingItems

LOOK_PAST = 16  # entries that don't fit and may be overtaken while a batch is filled


@dataclass(slots=True)
class NextBatch:
    """One look into the queue: a batch to run, entries that can't be in time any more, seconds until the next look."""

    items: list[QueueItem] = field(default_factory=list)
    expired: list[QueueItem] = field(default_factory=list)
    reason: str = ""
    wait: float | None = None


@dataclass(slots=True)
class BatchFill:
    """A batch in the making: its rows, the elements of one; `bound`: the most work with which all in it are in time;
    `short`: the reason to end it while more waits."""

    rows: int = 0
    widest: int = 1
    bound: float = math.inf
    short: str = "full"


class BatchQueue(WaitingItems):
    """Entries in, batches out; bounded in requests, rows, bytes and predicted seconds. Not thread-safe.

    `num_executors`: how many batches run at a time; each has a number, from 0.
    """

    def __init__(
        self,
        max_batch: int,
        limits: ServeLimits,
        clock: Callable[[], float] = time.monotonic,
        num_executors: int = 1,
    ) -> None:
        super().__init__(clock, LatencyModel())
        self.max_batch, self.limits, self.num_executors = max_batch, limits, num_executors
        self.admission = AdmissionController(self)
        self.draining = False
        self.running: dict[int, tuple[int, float]] = {}  # lane → work of its batch, since when
        self.finished = -math.inf  # when a batch was last measured

    def admission_for(self, tenant: str) -> AdmissionController:
        """The one door, or that of a tenant where each has a share."""
        return self.admission

    def full(self, requests: int, rows: int, size: int) -> str:
        """Why there is no place for so much more; "" where there is."""
        limits = self.limits
        if self.requests + requests > limits.max_queue_requests:
            return f"the queue holds {self.requests} requests"
        if self.rows + rows > limits.max_queue_rows or self.bytes + size > limits.max_queue_bytes:
            return f"the queue holds {self.rows} rows, {self.bytes} bytes"
        return ""

    def admit(self, items: Sequence[QueueItem], deadline: float) -> None:
        """All or none; raises as `AdmissionController.admit`."""
        self.admission_for(items[0].tenant).admit(items, deadline)
        self._enter(items)

    def admit_group(self, item: QueueItem, deadline: float) -> bool:
        """All of its requests or none; see `AdmissionController.together`."""
        entered = self.admission_for(item.tenant).admit_group(item, deadline)
        if entered:
            self._enter([item])
        return entered

    def take(self, executor: int = 0) -> NextBatch:
        """The next batch: the most urgent entry by (priority and age, deadline), and as many of its key as fit."""
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

    def _run(self, taken: NextBatch, executor: int) -> int:
        """The work of the batch, which runs from now on."""
        if not taken.items:
            return 0
        work = sum([e.rows for e in taken.items]) * max([1, *[e.elements for e in taken.items]])
        self.running[executor] = work, self.clock()
        return work

    def finish(self, seconds: float, executor: int = 0) -> None:
        """The batch that was taken is done; it took `seconds`, 0 if that is no measurement."""
        work, _ = self.running.pop(executor, (0, 0.0))
        if work and seconds > 0:
            self.finished = self.clock()
            self.latency.observe(work, seconds)

    def _delay(self, queue: list[HeapEntry]) -> float | None:
        delay = self.limits.max_delay_us / 1e6
        if not delay or self.draining:
            return None
        waiting = [heap_entry[3] for heap_entry in queue if heap_entry[3].waiting]
        left = min(item.arrived for item in waiting) + delay - self.clock()
        return left if left > 0 and sum(item.rows for item in waiting) < self.max_batch else None

    def _fill(self, queue: list[HeapEntry], taken: NextBatch) -> None:
        """As much as fits, and as leaves everybody in time who can be; what does not fit keeps its place."""
        filling, passed = BatchFill(), list[HeapEntry]()
        now, kind, budget = self.clock(), queue[0][3].key, None

        def room() -> float:
            nonlocal budget
            if budget is None:
                budget = DeadlineBudget(self.items(kind), self, now, (taken.items or [item])[0].least)
            return budget.room(heap_entry[:2])

        while queue and filling.rows < self.max_batch and len(passed) < LOOK_PAST:
            heap_entry = heapq.heappop(queue)
            item = heap_entry[3]
            if not item.waiting:
                self._dead -= 1
                continue
            if self._cannot_finish(item, now, alone=not filling.rows and self.requests == 1):
                self._leave(item)
                taken.expired.append(item)
                continue
            fit = self._fit(filling, item, item.requests, now, room)
            if fit < item.requests:
                passed.append(heap_entry)
                if not fit:
                    continue
                item = item.take(fit)
            self._leave(item)
            taken.items.append(item)
        for heap_entry in passed:
            heapq.heappush(queue, heap_entry)
        taken.reason = self._reason(filling, short=bool(passed))

    def _reason(self, filling: BatchFill, *, short: bool) -> str:
        return "full" if filling.rows >= self.max_batch else filling.short if short else "idle"

    def _fit(
        self, filling: BatchFill, item: QueueItem, most: int, now: float, room: Callable[[], float]
    ) -> int:
        """How many of its first `most` requests join the batch, which counts them. `room`: the most work with which
        everybody who goes before it is in time."""
        rows, wider, own = filling.rows, max(filling.widest, item.elements), self._in_time(item, now)
        each = item.rows // item.requests
        fit = (min(self.max_batch, self.limits.max_batch_elements // wider) - rows) // each
        fit = min(max(fit, 0 if rows else 1), most)
        if fit and rows + fit > 1:
            work = min(filling.bound, own, room())
            if (rows + fit * each) * wider > work:
                filling.short = "deadline"
                fit = min(max(int((work / wider - rows) // each), 0 if rows else 1), fit)
        if fit:
            filling.rows, filling.widest = rows + fit * each, wider
            filling.bound = min(filling.bound, own)
        return fit

    def _in_time(self, item: QueueItem, now: float) -> float:
        """The most work of a batch with which this is in time: surely, else probably, else it does not matter."""
        left, latency = item.deadline - now, self.latency
        for seconds in (left, left * latency.caution):
            if (most := latency.work_within(seconds)) >= item.least:
                return most
        return math.inf
