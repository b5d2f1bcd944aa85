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
from .admission import Door
from .deadline_budget import Item, Promises
from .latency_model import Speed
from .queue_items import Entry
from .waiting_items import Waiting

LOOK_PAST = 16  # entries that don't fit and may be overtaken while a batch is filled


@dataclass(slots=True)
class Taken:
    """One look into the queue: a batch to run, entries that can't be in time any more, seconds until the next look."""

    entries: list[Entry] = field(default_factory=list)
    expired: list[Entry] = field(default_factory=list)
    reason: str = ""
    wait: float | None = None


@dataclass(slots=True)
class Filling:
    """A batch in the making: its rows, the elements of one; `bound`: the most work with which all in it are in time;
    `short`: the reason to end it while more waits."""

    rows: int = 0
    widest: int = 1
    bound: float = math.inf
    short: str = "full"


class Batcher(Waiting):
    """Entries in, batches out; bounded in requests, rows, bytes and predicted seconds. Not thread-safe.

    `lanes`: how many batches run at a time; each has a number, from 0.
    """

    def __init__(
        self, max_batch: int, limits: ServeLimits, clock: Callable[[], float] = time.monotonic, lanes: int = 1
    ) -> None:
        super().__init__(clock, Speed())
        self.max_batch, self.limits, self.lanes = max_batch, limits, lanes
        self.door = Door(self)
        self.draining = False
        self.running: dict[int, tuple[int, float]] = {}  # lane → work of its batch, since when
        self.finished = -math.inf  # when a batch was last measured

    def door_of(self, tenant: str) -> Door:
        """The one door, or that of a tenant where each has a share."""
        return self.door

    def full(self, requests: int, rows: int, size: int) -> str:
        """Why there is no place for so much more; "" where there is."""
        limits = self.limits
        if self.requests + requests > limits.max_queue_requests:
            return f"the queue holds {self.requests} requests"
        if self.rows + rows > limits.max_queue_rows or self.bytes + size > limits.max_queue_bytes:
            return f"the queue holds {self.rows} rows, {self.bytes} bytes"
        return ""

    def admit(self, entries: Sequence[Entry], deadline: float) -> None:
        """All or none; raises as `Door.admit`."""
        self.door_of(entries[0].tenant).admit(entries, deadline)
        self._enter(entries)

    def admit_together(self, entry: Entry, deadline: float) -> bool:
        """All of its requests or none; see `Door.together`."""
        entered = self.door_of(entry.tenant).together(entry, deadline)
        if entered:
            self._enter([entry])
        return entered

    def take(self, lane: int = 0) -> Taken:
        """The next batch: the most urgent entry by (priority and age, deadline), and as many of its key as fit."""
        taken = Taken()
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
        self._run(taken, lane)
        return taken

    def _run(self, taken: Taken, lane: int) -> int:
        """The work of the batch, which runs from now on."""
        if not taken.entries:
            return 0
        work = sum([e.rows for e in taken.entries]) * max([1, *[e.elements for e in taken.entries]])
        self.running[lane] = work, self.clock()
        return work

    def finish(self, seconds: float, lane: int = 0) -> None:
        """The batch that was taken is done; it took `seconds`, 0 if that is no measurement."""
        work, _ = self.running.pop(lane, (0, 0.0))
        if work and seconds > 0:
            self.finished = self.clock()
            self.speed.observe(work, seconds)

    def _delay(self, queue: list[Item]) -> float | None:
        delay = self.limits.max_delay_us / 1e6
        if not delay or self.draining:
            return None
        waiting = [item[3] for item in queue if item[3].waiting]
        left = min(entry.arrived for entry in waiting) + delay - self.clock()
        return left if left > 0 and sum(entry.rows for entry in waiting) < self.max_batch else None

    def _fill(self, queue: list[Item], taken: Taken) -> None:
        """As much as fits, and as leaves everybody in time who can be; what does not fit keeps its place."""
        filling, passed = Filling(), list[Item]()
        now, kind, promises = self.clock(), queue[0][3].key, None

        def room() -> float:
            nonlocal promises
            if promises is None:
                promises = Promises(self.items(kind), self, now, (taken.entries or [entry])[0].least)
            return promises.room(item[:2])

        while queue and filling.rows < self.max_batch and len(passed) < LOOK_PAST:
            item = heapq.heappop(queue)
            entry = item[3]
            if not entry.waiting:
                self._dead -= 1
                continue
            if self._hopeless(entry, now, alone=not filling.rows and self.requests == 1):
                self._leave(entry)
                taken.expired.append(entry)
                continue
            fit = self._fit(filling, entry, entry.requests, now, room)
            if fit < entry.requests:
                passed.append(item)
                if not fit:
                    continue
                entry = entry.take(fit)
            self._leave(entry)
            taken.entries.append(entry)
        for item in passed:
            heapq.heappush(queue, item)
        taken.reason = self._reason(filling, short=bool(passed))

    def _reason(self, filling: Filling, *, short: bool) -> str:
        return "full" if filling.rows >= self.max_batch else filling.short if short else "idle"

    def _fit(self, filling: Filling, entry: Entry, most: int, now: float, room: Callable[[], float]) -> int:
        """How many of its first `most` requests join the batch, which counts them. `room`: the most work with which
        everybody who goes before it is in time."""
        rows, wider, own = filling.rows, max(filling.widest, entry.elements), self._in_time(entry, now)
        each = entry.rows // entry.requests
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

    def _in_time(self, entry: Entry, now: float) -> float:
        """The most work of a batch with which this is in time: surely, else probably, else it does not matter."""
        left, speed = entry.deadline - now, self.speed
        for seconds in (left, left * speed.caution):
            if (most := speed.work_within(seconds)) >= entry.least:
                return most
        return math.inf
