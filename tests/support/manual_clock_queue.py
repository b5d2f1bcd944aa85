"""A queue of the server whose clock is turned by hand."""

from __future__ import annotations

from typing import Any

from infer.serve.batching.admission import AdmissionController
from infer.serve.batching.batch_queue import BatchQueue
from infer.serve.batching.queue_items import QueueItem
from infer.serve.limits import ServeLimits


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class ManualClockQueue:
    """A batch queue, its admission and its clock; `put` adds an item of four elements a row."""

    def __init__(
        self, max_batch: int = 4, num_executors: int = 1, *, packed: bool = False, **limits: Any
    ) -> None:
        self.clock = Clock()
        self.queue = BatchQueue(max_batch, ServeLimits(**limits), self.clock, num_executors, packed=packed)
        self.admission, self.latency = AdmissionController(self.queue), self.queue.latency

    def admit(self, items: list[QueueItem]) -> None:
        self.admission.admit(items, items[0].deadline)
        self.queue.insert(items)

    def put(
        self,
        rows: int = 1,
        *,
        key: str = "k",
        timeout: float = 60,
        priority: int = 2,
        elements: int = 4,
        tenant: str = "",
        row_work: float = 0.0,
    ) -> QueueItem:
        deadline, size = self.clock.now + timeout, rows * elements * 4
        work = rows, elements, size
        item = QueueItem({}, {}, key, *work, deadline, priority, None, 0, tenant=tenant, row_work=row_work)
        self.admit([item])
        return item

    def measured(self, fixed: float, row: float) -> None:
        """Batches took `fixed` and `row` seconds for each row, without fail."""
        for rows in (1, 2, 4, 8) * 8:
            self.latency.observe(rows * 4, fixed + row * rows)

    def run(self, seconds: float, lane: int = 0) -> list[QueueItem]:
        """Run the next batch, which takes `seconds`."""
        items = self.queue.take(lane).items
        self.clock.now += seconds
        self.queue.finish(seconds, lane)
        return items

    def wait(self, priority: int = 255, tenant: str = "") -> float:
        return self.admission.backlog_seconds(priority, tenant)

    def ahead(self, priority: int = 255, deadline: float | None = None) -> tuple[float, float]:
        return self.queue.tenant("").ahead(priority, deadline)

    def overloaded(self, tenant: str = "") -> bool:
        return self.admission.pressure[tenant].overloaded
