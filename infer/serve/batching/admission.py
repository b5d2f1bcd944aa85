"""Admission control by queue limits and predicted completion time.

Up to a second of work may wait, so that a burst, or as many patient clients, are not refused. When a tenth of the
recent requests are refused or late although more waits than keeps the model busy, this is overload, not a burst: from
then on only that much may wait, until the queue is empty. (The idea is CoDel's: Nichols and Jacobson, Controlling Queue
Delay, 2012.) Under overload a request may not spend all of its time in the queue either: every batch would have to be
cut short to meet some deadline.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence

from ...errors import InferError, NotReadyError, OverloadedError, TooLargeError
from .queue_items import LOWEST_PRIORITY, HeapEntry, QueueItem, Urgency
from .urgency_heaps import QueueState, TenantState, WaitingState

TARGET_BATCHES = 2.5  # of useful size: the rest of the one that runs, and two that wait
MIN_WAIT_LIMIT, MAX_WAIT_LIMIT = 0.1, 1.0  # seconds of queue that keep a model busy: least and most
WAIT_SHARE = 2 / 3  # of a request's time that it may wait under overload; the rest is for its batch
OVERLOAD_SHARE = 0.1  # of recent requests refused or late
PRESSURE_WINDOW = 32  # recent requests
STALE_SECONDS = 1.0  # age of a measurement that refuses no request of an idle model


class AdmissionController:
    """Admission to `queue`, or to the part of it, `waiting`, that one tenant has. Times are seconds from now."""

    def __init__(self, queue: QueueState, waiting: WaitingState) -> None:
        self.queue, self.waiting = queue, waiting
        self.pressure = 0.0  # share of recent requests that were refused or late because too much waited
        self.overloaded = False

    def backlog_seconds(self, priority: int = LOWEST_PRIORITY) -> float:
        """Predict when work of this priority that arrives now would start, if all waiting work of it goes first."""
        queue = self.queue
        rows, work = self.waiting.ahead(priority)
        return self._busy() + queue.latency.seconds(work, self._batches(rows, work)) / queue.num_executors

    def admit(self, items: Sequence[QueueItem], deadline: float) -> None:
        """Raise `OverloadedError`, `TooLargeError` or `NotReadyError` unless all items may be queued."""
        limits = self.queue.limits
        rows, size = sum([e.rows for e in items]), sum([e.size_bytes for e in items])
        requests = sum([e.requests for e in items])
        if (
            rows > limits.max_queue_rows
            or size > limits.max_queue_bytes
            or requests > limits.max_queue_requests
        ):
            raise TooLargeError(f"expected at most {limits.max_queue_rows} rows in one request, got {rows}")
        if any(e.rows // e.requests * e.elements > limits.max_batch_elements for e in items):
            raise TooLargeError(
                f"expected at most {limits.max_batch_elements} elements per input of one batch, got more"
            )
        work = sum([e.work for e in items])
        self.check(items[0].priority, deadline, requests, rows, size, work)
        self._note(False)

    def admit_group(self, item: QueueItem, deadline: float) -> bool:
        """Return True if every request of the item would be admitted alone; they then count as admitted.

        A whole batch is judged as one request, so that the item must not be larger than a batch.
        """
        before = self.pressure, self.overloaded
        try:
            self.admit([item], deadline)
        except InferError:
            self.pressure, self.overloaded = before
            return False
        for _ in range(item.requests - 1):
            self._note(False)
        return True

    def check(
        self, priority: int, deadline: float, requests: int = 1, rows: int = 0, size: int = 0, work: float = 0
    ) -> None:
        """Raise `OverloadedError` or `NotReadyError` if this work would exceed a limit or miss its deadline.

        With the default amounts: if even the smallest request of this priority would.
        """
        queue, waiting = self.queue, self.waiting
        if queue.draining:
            raise NotReadyError("the server is stopping")
        if message := waiting.full(requests, rows, size):
            raise self._full(message)
        if not queue.latency.batches:
            return
        busy, (rows_ahead, work_ahead) = self._busy(), waiting.ahead(priority)
        done, left = self._done(busy, rows_ahead, work_ahead, rows, work), deadline - queue.clock()
        usual = not self.overloaded and queue.limits.max_wait_seconds is None
        if usual and done <= min(left, MAX_WAIT_LIMIT):
            return  # the usual case: no limit below is less, and no wait is more than `done`
        wait = busy + self._predict(rows_ahead, work_ahead)
        enough, most = self._bounds(busy, rows_ahead, work_ahead)
        allowed = enough if self.overloaded else most
        if wait > allowed:
            self._note(wait > enough)
            raise OverloadedError(
                f"queue wait {wait:.2f} s exceeds the {allowed:.2f} s limit", retry_after=wait
            )
        # The cheap test counts all waiting work as ahead. Where it fails, only work that is more urgent counts.
        share = _share(left / queue.latency.caution, busy, enough)
        if done <= left and (wait <= share or not self.overloaded):
            return
        rows_ahead, work_ahead = waiting.ahead(priority, deadline)
        own_wait = busy + self._predict(rows_ahead, work_ahead)
        done, own = self._done(busy, rows_ahead, work_ahead, rows, work), queue.latency.seconds(work)
        too_long = self.overloaded and own_wait > share
        if not (too_long or done > left) or not self._reliable():
            return
        self._note(own_wait > share and share + own <= left)
        allows = f"the {max(left, 0.0):.2f} s left to the request's deadline"
        message = f"predicted completion in {done:.2f} s exceeds {allows}"
        if too_long:
            message = (
                f"queue wait {own_wait:.2f} s exceeds the {share:.2f} s that an overloaded queue "
                f"allows of {allows}"
            )
        raise OverloadedError(message, retry_after=max(wait, own))

    def note_expired(self, item: QueueItem) -> None:
        """Count an admitted item whose deadline passed, if it would have been in time with a shorter queue."""
        busy, allowed = self._busy(), item.deadline - item.arrived
        enough, _ = self._bounds(busy, *self.waiting.ahead(item.priority))
        self._note(allowed >= _share(allowed, busy, enough) + self.queue.latency.seconds(item.work))

    def _note(self, pressed: bool) -> None:
        self.pressure += (pressed - self.pressure) / PRESSURE_WINDOW
        self.overloaded = self.pressure > OVERLOAD_SHARE or (self.overloaded and self.waiting.requests > 0)

    def _full(self, message: str) -> OverloadedError:
        self._note(True)
        return OverloadedError(message, retry_after=self.backlog_seconds())

    def _busy(self) -> float:
        """Predict when the first executor is free. A batch later than predicted is expected to take as long again."""
        queue = self.queue
        if len(queue.running) < queue.num_executors or not queue.latency.batches:
            return 0.0
        now, latency = queue.clock(), queue.latency
        return min([abs(latency.seconds(work) - (now - since)) for work, since in queue.running.values()])

    def _predict(self, rows: float, work: float) -> float:
        """Predict the seconds that waiting work takes on all executors."""
        return self.queue.latency.seconds(work, self._batches(rows, work)) / self.queue.num_executors

    def _batches(self, rows: float, work: float) -> int:
        """Return the least number of batches that rows and work take: full ones, and one for each batch key."""
        if not rows:
            return 0
        queue = self.queue
        full = max(rows / queue.max_batch, work / queue.limits.max_batch_elements)
        return max(math.ceil(full), min(queue.kinds, math.ceil(rows)))

    def _bounds(self, busy: float, rows: float, work: float) -> tuple[float, float]:
        """Return the seconds of waiting that keep the model busy, and the most that are allowed.

        The first is `TARGET_BATCHES` batches. Both are at least the running batch and one more.
        """
        queue, latency = self.queue, self.queue.latency
        if queue.limits.max_wait_seconds is not None:
            return (queue.limits.max_wait_seconds,) * 2
        full = work / rows * queue.max_batch if rows else 0.0
        useful = latency.seconds(min(full, latency.useful_work))
        enough = max(MIN_WAIT_LIMIT, min(TARGET_BATCHES * useful, MAX_WAIT_LIMIT), busy + useful)
        return enough, max(MAX_WAIT_LIMIT, busy + latency.seconds(full), enough)

    def _done(self, busy: float, rows_ahead: float, work_ahead: float, rows: float, work: float) -> float:
        """Predict the seconds until new work is done, after the queued work ahead, with the model's margin."""
        everything = self._predict(rows_ahead + rows, work_ahead + work)
        return (busy + max(everything, self.queue.latency.seconds(work))) * self.queue.latency.caution

    def _reliable(self) -> bool:
        """Return true if the latency estimate is recent; a stale one would refuse work without being renewed."""
        queue = self.queue
        busy = queue.requests or queue.running
        return bool(busy) or (queue.latency.steady and queue.clock() - queue.finished < STALE_SECONDS)


def _share(allowed: float, busy: float, enough: float) -> float:
    """Return the seconds, of those that a request allows, that it may wait under overload."""
    return max(busy, min(enough, allowed * WAIT_SHARE))


class DeadlineBudget:
    """Time that a batch may take before `waiting` items, which cannot join it, miss their deadlines.

    The batch starts `now` and holds at least `work`. The waiting items are expected to run after it in order of
    urgency, each batch key in one batch, on all executors.
    """

    def __init__(self, waiting: Iterable[HeapEntry], queue: QueueState, now: float, work: float) -> None:
        self._waiting = sorted(waiting, key=lambda entry: entry[:3], reverse=True)
        self._latency, self._now, self._num_executors = queue.latency, now, queue.num_executors
        self._least = queue.latency.seconds(work) * queue.latency.caution
        self._kinds, self._work, self._slack = set[Hashable](), 0.0, math.inf

    def max_work(self, urgency: Urgency) -> float:
        """Return the most work of the batch with which every more urgent waiting item still meets its deadline.

        Items that miss it in any case do not count. Call with ever less urgent values: items are consumed.
        """
        latency = self._latency
        while self._waiting and self._waiting[-1][:2] < urgency:
            item = self._waiting.pop()[3]
            kinds = len(self._kinds | {item.key})
            for _ in range(item.requests):
                work = self._work + item.work_per_request
                seconds = latency.seconds(work, kinds) * latency.caution / self._num_executors
                slack = item.deadline - self._now - seconds
                if slack < self._least:
                    break
                self._kinds.add(item.key)
                self._work, self._slack = work, min(self._slack, slack)
        return latency.work_within(self._slack)


class FairDeadlineBudget:
    """Deadline budgets of tenants that fill a batch of key `kind` in the order of their service counters."""

    def __init__(self, tenants: Iterable[TenantState], kind: Hashable, queue: QueueState, now: float) -> None:
        self._tenants, self._kind, self._queue, self._now = list(tenants), kind, queue, now
        self._next: list[tuple[TenantState, HeapEntry]] | None = None
        self._budgets: dict[str, tuple[DeadlineBudget, DeadlineBudget]] = {}

    def max_work(self, tenant: TenantState, entry: HeapEntry, served: float, work: float) -> float:
        """Return the most work of the batch with which all items that go before `entry` meet their deadlines.

        These are more urgent items of its tenant, and the next item of each tenant with a counter below `served`.
        `work`: least work of the batch, as for `DeadlineBudget`.
        """
        if not self._next_of_each():
            return math.inf
        budgets = self._budgets.get(tenant.name)
        if budgets is None:
            others = [first for other, first in self._next_of_each() if other is not tenant]
            options = self._queue, self._now, work
            budgets = DeadlineBudget(tenant.items(self._kind), *options), DeadlineBudget(others, *options)
            self._budgets[tenant.name] = budgets
        return min(budgets[0].max_work(entry[:2]), budgets[1].max_work((served, 0.0)))

    def _next_of_each(self) -> list[tuple[TenantState, HeapEntry]]:
        """Return the most urgent item of each tenant, with the tenant's counter as its urgency."""
        if self._next is None:
            self._next = []
            for number, tenant in enumerate(self._tenants):
                first = min(tenant.items(self._kind), default=None, key=lambda entry: entry[:3])
                if first is not None:
                    self._next.append((tenant, (tenant.served, 0.0, number, first[3])))
        return self._next
