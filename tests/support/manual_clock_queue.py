"""A queue of the server whose clock is turned by hand."""

from __future__ import annotations

from typing import Any

from infer.serve.batching.queue import Batcher
from infer.serve.batching.queue_items import Entry
from infer.serve.limits import ServeLimits


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Desk:
    """A batcher, its clock, and entries of four elements a row made in a word."""

    def __init__(self, max_batch: int = 4, lanes: int = 1, **limits: Any) -> None:
        self.clock = Clock()
        self.batcher = Batcher(max_batch, ServeLimits(**limits), self.clock, lanes)
        self.door, self.speed = self.batcher.door, self.batcher.speed

    def put(
        self,
        rows: int = 1,
        *,
        key: str = "k",
        timeout: float = 60,
        priority: int = 2,
        elements: int = 4,
        tenant: str = "",
    ) -> Entry:
        deadline, size = self.clock.now + timeout, rows * elements * 4
        entry = Entry({}, {}, key, rows, elements, size, deadline, priority, None, 0, tenant=tenant)
        self.batcher.admit([entry], deadline)
        return entry

    def measured(self, fixed: float, row: float) -> None:
        """Batches took `fixed` and `row` seconds for each row, without fail."""
        for rows in (1, 2, 4, 8) * 8:
            self.speed.observe(rows * 4, fixed + row * rows)

    def run(self, seconds: float, lane: int = 0) -> list[Entry]:
        """The next batch, which takes so long."""
        entries = self.batcher.take(lane).entries
        self.clock.now += seconds
        self.batcher.finish(seconds, lane)
        return entries

    def wait(self, priority: int = 255) -> float:
        return self.door.backlog_seconds(priority)
