"""The queue and the rule by which batches are made of it. No threads, no sleeping, any clock.

It never waits by default: when the executor is free, the most urgent request is taken and the batch filled
with others of its key. See `engine` for the thread that runs them.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import NotReadyError, OverloadedError, TooLargeError
from .limits import ServeLimits

LOOK_PAST = 16  # entries that don't fit and may be overtaken while a batch is filled


@dataclass(slots=True, eq=False)
class Entry:
    """A piece of one request that runs in one batch. `elements`: of one row of its largest input."""

    inputs: dict[str, Any]
    sizes: dict[str, int]
    key: Hashable
    rows: int
    elements: int
    size_bytes: int
    deadline: float
    priority: int
    ticket: Any
    index: int
    arrived: float = 0.0
    waiting: bool = False
    deaths: int = 0  # of workers while it ran


@dataclass(slots=True)
class Taken:
    """One look into the queue: a batch to run, entries whose time is up, or seconds until the next look."""

    entries: list[Entry] = field(default_factory=list)
    expired: list[Entry] = field(default_factory=list)
    reason: str = ""
    wait: float | None = None


class Speed:
    """Seconds of a batch as a + b·rows, by least squares over the recent past (each batch weighs 1/16)."""

    def __init__(self) -> None:
        self.batches = 0
        self._n = self._t = self._nn = self._nt = 0.0

    def observe(self, rows: int, seconds: float) -> None:
        self.batches += 1
        weight = max(1 / self.batches, 1 / 16)
        self._n += weight * (rows - self._n)
        self._t += weight * (seconds - self._t)
        self._nn += weight * (rows * rows - self._nn)
        self._nt += weight * (rows * seconds - self._nt)

    def seconds(self, rows: int) -> float:
        """0 before the first batch: an unmeasured model turns nobody away."""
        if not self.batches or not rows:
            return 0.0
        variance = self._nn - self._n * self._n
        slope = (self._nt - self._n * self._t) / variance if variance > 1e-6 * self._nn else 0.0
        slope = min(max(slope, 0.0), self._t / self._n)
        return max(self._t + slope * (rows - self._n), 0.0)


class Batcher:
    """Entries in, batches out; bounded in requests, rows, bytes and predicted seconds. Not thread-safe.

    `lanes`: how many batches run at a time; each has a number, from 0.
    """

    def __init__(
        self, max_batch: int, limits: ServeLimits, clock: Callable[[], float] = time.monotonic, lanes: int = 1
    ) -> None:
        self.max_batch, self.limits, self.clock, self.lanes = max_batch, limits, clock, lanes
        self.speed = Speed()
        self.requests = self.rows = self.bytes = 0
        self.draining = False
        self._running: dict[int, tuple[int, float]] = {}  # lane → rows of its batch, since when
        self._queues: dict[Hashable, list[tuple[int, float, int, Entry]]] = {}
        self._order = itertools.count()
        self._dead = 0

    def backlog_seconds(self) -> float:
        """How long from now until work that arrives now would start, by the speed measured."""
        full, rest = divmod(self.rows, self.max_batch)
        queued = full * self.speed.seconds(self.max_batch) + self.speed.seconds(rest)
        if len(self._running) < self.lanes:
            return queued / self.lanes
        now = self.clock()
        current = [self.speed.seconds(rows) - (now - since) for rows, since in self._running.values()]
        return queued / self.lanes + max(min(current), 0.0)

    def admit(self, entries: Sequence[Entry], deadline: float) -> None:
        """All or none. Raises `OverloadedError`, `TooLargeError`, `NotReadyError`."""
        limits, now = self.limits, self.clock()
        rows, size = sum(e.rows for e in entries), sum(e.size_bytes for e in entries)
        if (
            rows > limits.max_queue_rows
            or size > limits.max_queue_bytes
            or len(entries) > limits.max_queue_requests
        ):
            raise TooLargeError(f"one request may hold {limits.max_queue_rows} rows, this one holds {rows}")
        if any(e.rows * e.elements > limits.max_batch_elements for e in entries):
            raise TooLargeError(f"one batch may hold {limits.max_batch_elements} elements per input")
        if self.draining:
            raise NotReadyError("the server is stopping")
        wait = self.backlog_seconds()
        if self.requests + len(entries) > limits.max_queue_requests:
            raise OverloadedError(f"the queue holds {self.requests} requests", retry_after=wait)
        if self.rows + rows > limits.max_queue_rows or self.bytes + size > limits.max_queue_bytes:
            raise OverloadedError(f"the queue holds {self.rows} rows, {self.bytes} bytes", retry_after=wait)
        if wait > limits.max_wait_seconds or now + wait > deadline:
            raise OverloadedError(f"work that arrives now would start in {wait:.1f} s", retry_after=wait)
        for entry in entries:
            entry.arrived, entry.waiting = now, True
            queue = self._queues.setdefault(entry.key, [])
            heapq.heappush(queue, (entry.priority, entry.deadline, next(self._order), entry))
        self.requests += len(entries)
        self.rows += rows
        self.bytes += size

    def cancel(self, entry: Entry) -> bool:
        """Whether it was still waiting; it will be in no batch then, and its tensors are let go."""
        if not entry.waiting:
            return False
        self._leave(entry)
        entry.inputs = {}
        self._dead += 1
        if self._dead > max(64, self.requests):
            self._sweep()
        return True

    def take(self, lane: int = 0) -> Taken:
        """The next batch: the most urgent entry by (priority, deadline), and as many of its key as fit."""
        taken = Taken()
        key = self._most_urgent(taken.expired)
        if key is None:
            return taken
        queue = self._queues[key]
        taken.wait = self._delay(queue)
        if taken.wait is not None:
            return taken
        full = self._fill(queue, taken)
        taken.reason = "full" if full else "idle"
        if not queue:
            del self._queues[key]
        if taken.entries:
            self._running[lane] = sum(e.rows for e in taken.entries), self.clock()
        return taken

    def finish(self, rows: int, seconds: float, lane: int = 0) -> None:
        """The batch that was taken is done; it took `seconds`, 0 if that is no measurement."""
        self._running.pop(lane, None)
        if seconds > 0:
            self.speed.observe(rows, seconds)

    def clear(self) -> list[Entry]:
        """Everything that waits, taken out."""
        entries = [item[3] for queue in self._queues.values() for item in queue if item[3].waiting]
        for entry in entries:
            self._leave(entry)
        self._queues.clear()
        return entries

    def _most_urgent(self, expired: list[Entry]) -> Hashable | None:
        now, best, chosen = self.clock(), None, None
        for key in list(self._queues):
            queue = self._queues[key]
            while queue and (not queue[0][3].waiting or queue[0][3].deadline <= now):
                entry = heapq.heappop(queue)[3]
                if entry.waiting:
                    self._leave(entry)
                    expired.append(entry)
                else:
                    self._dead -= 1
            if not queue:
                del self._queues[key]
            elif best is None or queue[0][:3] < best:
                best, chosen = queue[0][:3], key
        return chosen

    def _delay(self, queue: list[tuple[int, float, int, Entry]]) -> float | None:
        delay = self.limits.max_delay_us / 1e6
        if not delay or self.draining:
            return None
        waiting = [item[3] for item in queue if item[3].waiting]
        left = min(entry.arrived for entry in waiting) + delay - self.clock()
        return left if left > 0 and sum(entry.rows for entry in waiting) < self.max_batch else None

    def _fill(self, queue: list[tuple[int, float, int, Entry]], taken: Taken) -> bool:
        """Whether the batch holds all that it may. Entries that don't fit keep their place."""
        rows, elements = 0, 0
        passed: list[tuple[int, float, int, Entry]] = []
        now, limits = self.clock(), self.limits
        while queue and rows < self.max_batch and len(passed) < LOOK_PAST:
            item = heapq.heappop(queue)
            entry = item[3]
            widest = max(elements, entry.elements)
            if not entry.waiting:
                self._dead -= 1
            elif entry.deadline <= now:
                self._leave(entry)
                taken.expired.append(entry)
            elif rows and (
                rows + entry.rows > self.max_batch or (rows + entry.rows) * widest > limits.max_batch_elements
            ):
                passed.append(item)
            else:
                self._leave(entry)
                taken.entries.append(entry)
                rows, elements = rows + entry.rows, widest
        for item in passed:
            heapq.heappush(queue, item)
        return rows >= self.max_batch or bool(passed)

    def _leave(self, entry: Entry) -> None:
        entry.waiting = False
        self.requests -= 1
        self.rows -= entry.rows
        self.bytes -= entry.size_bytes

    def _sweep(self) -> None:
        for key, queue in list(self._queues.items()):
            self._queues[key] = alive = [item for item in queue if item[3].waiting]
            heapq.heapify(alive)
            if not alive:
                del self._queues[key]
        self._dead = 0
