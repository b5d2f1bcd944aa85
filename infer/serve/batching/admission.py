"""Admission control by queue limits and predicted completion time.

Up to a second of work may wait, so that a burst, or as many patient clients, are not refused. When a tenth of the
recent requests are refused or late although more waits than keeps the model busy, this is overload, not a burst: from
then on only that much may wait, until the queue is empty. (The idea is CoDel's: Nichols and Jacobson, Controlling Queue
Delay, 2012.) Under overload a request may not spend all of its time in the queue either: every batch would have to be
cut short to meet some deadline.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...errors import InferError, NotReadyError, OverloadedError, TooLargeError
from ...llm.engine.scheduling.engine_limits import is_beyond_share
from .batch_queue import BatchQueue, TenantQueue
from .queue_items import LOWEST_PRIORITY, QueueItem

TARGET_BATCHES = 2.5  # of useful size: the rest of the one that runs, and two that wait
MIN_WAIT_LIMIT, MAX_WAIT_LIMIT = 0.1, 1.0  # seconds of queue that keep a model busy: least and most
WAIT_SHARE = 2 / 3  # of a request's time that it may wait under overload; the rest is for its batch
OVERLOAD_SHARE = 0.1  # of recent requests refused or late
PRESSURE_WINDOW = 32  # recent requests
STALE_SECONDS = 1.0  # age of a measurement that refuses no request of an idle model


@dataclass(slots=True)
class Pressure:
    """Overload of one tenant. `share`: of its recent requests that were refused or late because too much waited."""

    share: float = 0.0
    overloaded: bool = False


class AdmissionController:
    """Admission to the queue of one model, for each tenant by its share. Times are seconds from now."""

    def __init__(self, queue: BatchQueue) -> None:
        self.queue = queue
        self.pressure: defaultdict[str, Pressure] = defaultdict(Pressure)  # by tenant

    def backlog_seconds(self, priority: int = LOWEST_PRIORITY, tenant: str = "") -> float:
        """Predict when work of this priority that arrives now would start, if all waiting work of it goes first."""
        return self._busy() + self._predict(*self.queue.tenant(tenant).ahead(priority))

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
        work, tenant = sum([e.work for e in items]), items[0].tenant
        self.check(items[0].priority, deadline, requests, rows, size, work, tenant=tenant)
        self._note(tenant, False)

    def admit_group(self, item: QueueItem, deadline: float) -> bool:
        """Return True if every request of the item would be admitted alone; they then count as admitted.

        A whole batch is judged as one request, so that the item must not be larger than a batch.
        """
        before = replace(self.pressure[item.tenant])
        try:
            self.admit([item], deadline)
        except InferError:
            self.pressure[item.tenant] = before
            return False
        for _ in range(item.requests - 1):
            self._note(item.tenant, False)
        return True

    def check(
        self,
        priority: int,
        deadline: float,
        requests: int = 1,
        rows: int = 0,
        size: int = 0,
        work: float = 0,
        *,
        tenant: str = "",
    ) -> None:
        """Raise `OverloadedError` or `NotReadyError` if this work would exceed a limit or miss its deadline.

        With the default amounts: if even the smallest request of this priority would.
        """
        queue, waiting = self.queue, self.queue.tenant(tenant)
        if queue.draining:
            raise NotReadyError("the server is stopping")
        if message := self._full(waiting, requests, rows, size):
            self._note(tenant, True)
            raise OverloadedError(message, retry_after=self.backlog_seconds(tenant=tenant))
        if not queue.latency.batches:
            return
        busy, (rows_ahead, work_ahead) = self._busy(), waiting.ahead(priority)
        done, left = self._done(busy, rows_ahead, work_ahead, rows, work), deadline - queue.clock()
        overloaded = self.pressure[tenant].overloaded
        usual = not overloaded and queue.limits.max_wait_seconds is None
        if usual and done <= min(left, MAX_WAIT_LIMIT):
            return  # the usual case: no limit below is less, and no wait is more than `done`
        wait = busy + self._predict(rows_ahead, work_ahead)
        enough, most = self._bounds(busy, rows_ahead, work_ahead)
        allowed = enough if overloaded else most
        if wait > allowed:
            self._note(tenant, wait > enough)
            raise OverloadedError(
                f"queue wait {wait:.2f} s exceeds the {allowed:.2f} s limit", retry_after=wait
            )
        # The cheap test counts all waiting work as ahead. Where it fails, only work that is more urgent counts.
        share = _share(left / queue.latency.caution, busy, enough)
        if done <= left and (wait <= share or not overloaded):
            return
        rows_ahead, work_ahead = waiting.ahead(priority, deadline)
        own_wait = busy + self._predict(rows_ahead, work_ahead)
        done, own = self._done(busy, rows_ahead, work_ahead, rows, work), queue.latency.seconds(work)
        too_long = overloaded and own_wait > share
        if not (too_long or done > left) or not self._reliable():
            return
        self._note(tenant, own_wait > share and share + own <= left)
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
        enough, _ = self._bounds(busy, *self.queue.tenant(item.tenant).ahead(item.priority))
        own = self.queue.latency.seconds(item.work)
        self._note(item.tenant, allowed >= _share(allowed, busy, enough) + own)

    def _note(self, tenant: str, pressed: bool) -> None:
        """Count a request of a tenant. `pressed`: it was refused or late because too much waited."""
        pressure, waits = self.pressure[tenant], self.queue.tenant(tenant).requests > 0
        pressure.share += (pressed - pressure.share) / PRESSURE_WINDOW
        pressure.overloaded = pressure.share > OVERLOAD_SHARE or (pressure.overloaded and waits)

    def _full(self, waiting: TenantQueue, requests: int, rows: int, size: int) -> str:
        """Describe the queue limit that further work would exceed; "" if none, or below the tenant's share."""
        queue, limits = self.queue, self.queue.limits
        if (
            queue.requests + requests <= limits.max_queue_requests
            and queue.rows + rows <= limits.max_queue_rows
            and queue.bytes + size <= limits.max_queue_bytes
        ):
            return ""
        tenants = len(queue.active) + (waiting.name not in queue.active)
        for what, own, total, more, limit in (
            ("requests", waiting.requests, queue.requests, requests, limits.max_queue_requests),
            ("rows", waiting.rows, queue.rows, rows, limits.max_queue_rows),
            ("bytes", waiting.bytes, queue.bytes, size, limits.max_queue_bytes),
        ):
            if is_beyond_share(own + more, total + more, tenants, limit):
                message = f"the queue holds {total} {what}"
                if tenants == 1:
                    return message
                if (own + more) * tenants <= limit:
                    return f"{message}, twice its limit"
                return f"{message}, {own} of them of this API key, whose share is {limit // tenants}"
        return ""

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
