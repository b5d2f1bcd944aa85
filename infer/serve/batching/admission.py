"""Who may join the queue of tensors: bounds, and when the work would be done by the speed measured.

A second of work may wait, so that a burst, or as many patient clients, are not turned away. When a tenth of those who
come are, or are late, although more waits than keeps the model busy, this is no burst: from then on only that much may
wait, until the queue has run dry. (The idea is CoDel's: Nichols and Jacobson, Controlling Queue Delay, 2012.)
Nor may a crowd spend in the queue all the time that it allows: every batch would have to be cut short for somebody.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...errors import InferError, NotReadyError, OverloadedError, TooLargeError

if TYPE_CHECKING:
    from .fair_queue import TenantQueue
    from .queue import BatchQueue
    from .queue_items import QueueItem

TARGET_BATCHES = 2.5  # batches as large as is useful: what is left of one that runs, and two that wait
MIN_WAIT_LIMIT, MAX_WAIT_LIMIT = 0.1, 1.0  # seconds of queue that keep a model busy at least, and at most
WAIT_SHARE = 2 / 3  # of what a request allows is for waiting, in a crowd; the rest is for its batch
OVERLOAD_SHARE = 0.1  # of those who come
PRESSURE_WINDOW = 32  # of them
STALE_SECONDS = 1.0  # seconds after which a measure turns nobody away from an idle model
LOWEST_PRIORITY = 255


class AdmissionController:
    """Predicts for a `BatchQueue`, or for the part of it that one tenant has; all its times are seconds from now."""

    def __init__(self, queue: BatchQueue, tenant_queue: TenantQueue | None = None) -> None:
        self.queue, self.tenant_queue = queue, tenant_queue or queue
        self.pressure = 0.0  # share of the recent ones who were turned away, or late, as too much waited
        self.overloaded = False

    def backlog_seconds(self, priority: int = LOWEST_PRIORITY) -> float:
        """Until work of this priority that arrives now would start, should all of its priority go first."""
        queue = self.queue
        rows, work = self.tenant_queue.ahead(priority)
        return self._busy() + queue.latency.seconds(work, self._batches(rows, work)) / queue.num_executors

    def admit(self, items: Sequence[QueueItem], deadline: float) -> None:
        """All or none. Raises `OverloadedError`, `TooLargeError`, `NotReadyError`."""
        limits = self.queue.limits
        rows, size = sum([e.rows for e in items]), sum([e.size_bytes for e in items])
        requests = sum([e.requests for e in items])
        if (
            rows > limits.max_queue_rows
            or size > limits.max_queue_bytes
            or requests > limits.max_queue_requests
        ):
            raise TooLargeError(f"one request may hold {limits.max_queue_rows} rows, this one holds {rows}")
        if any(e.rows // e.requests * e.elements > limits.max_batch_elements for e in items):
            raise TooLargeError(f"one batch may hold {limits.max_batch_elements} elements per input")
        work = sum([e.work for e in items])
        self.check(items[0].priority, deadline, requests, rows, size, work)
        self._note(False)

    def admit_group(self, item: QueueItem, deadline: float) -> bool:
        """Whether its requests would all be let in, were they asked for one by one; then they are. A whole batch of
        them is judged as one request, so that they must be no more than that."""
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
        self, priority: int, deadline: float, items: int = 1, rows: int = 0, size: int = 0, work: float = 0
    ) -> None:
        """The same of so much work; with the least of it, whether anybody of this priority may come at all."""
        queue, tenant_queue = self.queue, self.tenant_queue
        if queue.draining:
            raise NotReadyError("the server is stopping")
        if words := tenant_queue.full(items, rows, size):
            raise self._full(words)
        if not queue.latency.batches:
            return
        busy, (before, waiting) = self._busy(), tenant_queue.ahead(priority)
        wait = busy + queue.latency.seconds(waiting, self._batches(before, waiting)) / queue.num_executors
        enough, most = self._bounds(busy, before, waiting)
        allowed = enough if self.overloaded else most
        if wait > allowed:
            self._note(wait > enough)
            words = f"would start in {wait:.2f} s, the queue lets {allowed:.2f} be waited"
            raise OverloadedError(f"work that arrives now {words}", retry_after=wait)
        left = deadline - queue.clock()
        share = _share(left / queue.latency.caution, busy, enough)
        if self._done(busy, before, waiting, rows, work) <= left and (wait <= share or not self.overloaded):
            return
        before, waiting = tenant_queue.ahead(priority, deadline)
        mine = busy + queue.latency.seconds(waiting, self._batches(before, waiting)) / queue.num_executors
        done, own = self._done(busy, before, waiting, rows, work), queue.latency.seconds(work)
        overloaded = self.overloaded and mine > share
        if not (overloaded or done > left) or not self._sure():
            return
        self._note(mine > share and share + own <= left)
        words = f"would be done in {done:.2f} s, the request allows {left:.2f}"
        if overloaded:
            words = f"would start in {mine:.2f} s, a crowded queue lets it wait {share:.2f} of its {left:.2f}"
        raise OverloadedError(f"work that arrives now {words}", retry_after=max(wait, own))

    def late(self, item: QueueItem) -> None:
        """It was let in, and its time ran out; that counts if it would not have with less before it."""
        busy, allowed = self._busy(), item.deadline - item.arrived
        enough, _ = self._bounds(busy, *self.tenant_queue.ahead(item.priority))
        self._note(allowed >= _share(allowed, busy, enough) + self.queue.latency.seconds(item.work))

    def _note(self, pressed: bool) -> None:
        self.pressure += (pressed - self.pressure) / PRESSURE_WINDOW
        self.overloaded = self.pressure > OVERLOAD_SHARE or (
            self.overloaded and self.tenant_queue.requests > 0
        )

    def _full(self, words: str) -> OverloadedError:
        self._note(True)
        return OverloadedError(words, retry_after=self.backlog_seconds())

    def _busy(self) -> float:
        """Until the first lane is free. A batch that takes longer than expected is believed to go on as long again."""
        queue = self.queue
        if len(queue.running) < queue.num_executors or not queue.latency.batches:
            return 0.0
        now, latency = queue.clock(), queue.latency
        return min([abs(latency.seconds(work) - (now - since)) for work, since in queue.running.values()])

    def _batches(self, rows: float, work: float) -> int:
        """How many it takes at least; those of two keys never share one."""
        if not rows:
            return 0
        queue = self.queue
        full = max(rows / queue.max_batch, work / queue.limits.max_batch_elements)
        return max(math.ceil(full), min(queue.kinds, math.ceil(rows)))

    def _bounds(self, busy: float, rows: float, work: float) -> tuple[float, float]:
        """Seconds of waiting that keep the model busy, and that are allowed at most.

        The first: `TARGET_BATCHES`. Both: at least what runs and one batch more.
        """
        queue, latency = self.queue, self.queue.latency
        if queue.limits.max_wait_seconds is not None:
            return (queue.limits.max_wait_seconds,) * 2
        full = work / rows * queue.max_batch if rows else 0.0
        useful = latency.seconds(min(full, latency.useful_work))
        enough = max(MIN_WAIT_LIMIT, min(TARGET_BATCHES * useful, MAX_WAIT_LIMIT), busy + useful)
        return enough, max(MAX_WAIT_LIMIT, busy + latency.seconds(full), enough)

    def _done(self, busy: float, before: float, waiting: float, rows: float, work: float) -> float:
        """Until work behind all that is done, cautiously."""
        latency, num_executors = self.queue.latency, self.queue.num_executors
        everything = (
            latency.seconds(waiting + work, self._batches(before + rows, waiting + work)) / num_executors
        )
        return (busy + max(everything, latency.seconds(work))) * latency.caution

    def _sure(self) -> bool:
        """Whether the measure is of now: one that nothing renews would turn everybody away for ever."""
        queue = self.queue
        busy = queue.requests or queue.running
        return bool(busy) or (queue.latency.steady and queue.clock() - queue.finished < STALE_SECONDS)


def _share(allowed: float, busy: float, enough: float) -> float:
    """Of the seconds that a request allows, those that a crowd may let it wait for."""
    return max(busy, min(enough, allowed * WAIT_SHARE))
