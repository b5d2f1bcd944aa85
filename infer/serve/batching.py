"""The queue and the rule by which batches are made of it. No threads, no sleeping, any clock.

It never waits by default: when the executor is free, the most urgent request is taken and the batch filled
with others of its key. See `engine` for the thread that runs them.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from .door import LEAST_PRIORITY, Door
from .entries import Entry
from .limits import ServeLimits
from .promises import Item, Promises
from .speed import Speed

AGING = 2.0  # seconds of waiting that are worth one step of priority, so that nobody starves
LOOK_PAST = 16  # entries that don't fit and may be overtaken while a batch is filled


@dataclass(slots=True)
class Taken:
    """One look into the queue: a batch to run, entries that can't be in time any more, seconds until the next look."""

    entries: list[Entry] = field(default_factory=list)
    expired: list[Entry] = field(default_factory=list)
    reason: str = ""
    wait: float | None = None


class Batcher:
    """Entries in, batches out; bounded in requests, rows, bytes and predicted seconds. Not thread-safe.

    `lanes`: how many batches run at a time; each has a number, from 0.
    """

    def __init__(
        self, max_batch: int, limits: ServeLimits, clock: Callable[[], float] = time.monotonic, lanes: int = 1
    ) -> None:
        self.max_batch, self.limits, self.clock, self.lanes = max_batch, limits, clock, lanes
        self.speed, self.door = Speed(), Door(self)
        self.requests = self.rows = self.bytes = 0
        self.draining = False
        self.running: dict[int, tuple[int, float]] = {}  # lane → work of its batch, since when
        self.finished = -math.inf  # when a batch was last measured
        self._queues: dict[Hashable, list[Item]] = {}
        self._waiting: dict[int, tuple[int, int]] = {}  # priority → rows and work
        self._order = itertools.count()
        self._dead = 0

    @property
    def keys(self) -> int:
        """How many kinds of work wait that can't share a batch."""
        return len(self._queues)

    def ahead(self, priority: int = LEAST_PRIORITY, deadline: float | None = None) -> tuple[int, int]:
        """Rows and work that wait and would go before new work of this priority and, where given, deadline."""
        rows = work = 0
        if deadline is None:
            for urgency, (some, theirs) in self._waiting.items():
                if urgency <= priority:
                    rows, work = rows + some, work + theirs
            return rows, work
        mine = self._urgency(priority), deadline
        for queue in self._queues.values():
            for urgency, until, _, entry in queue:
                if entry.waiting and (urgency, until) <= mine:
                    rows, work = rows + entry.rows, work + entry.work
        return rows, work

    def admit(self, entries: Sequence[Entry], deadline: float) -> None:
        """All or none; raises as `Door.admit`."""
        self.door.admit(entries, deadline)
        self._enter(entries)

    def admit_together(self, entry: Entry, deadline: float) -> bool:
        """All of its requests or none; see `Door.together`."""
        entered = self.door.together(entry, deadline)
        if entered:
            self._enter([entry])
        return entered

    def _enter(self, entries: Sequence[Entry]) -> None:
        now = self.clock()
        for entry in entries:
            entry.arrived, entry.waiting = now, True
            queue = self._queues.setdefault(entry.key, [])
            urgency = self._urgency(entry.priority)
            heapq.heappush(queue, (urgency, entry.deadline, next(self._order), entry))
            self._count(entry, 1)

    def _urgency(self, priority: int) -> int:
        """The place of what comes now among all: what has waited goes before later work of more priority."""
        return priority + int(self.clock() / AGING)

    def cancel(self, entry: Entry) -> bool:
        """Whether it was still waiting; it will be in no batch then, and what it holds is let go."""
        if not entry.waiting:
            return False
        self._leave(entry)
        entry.inputs, entry.ticket = {}, None
        self._dead += 1
        if self._dead > max(64, self.requests):
            self._sweep()
        return True

    def drop(self, entry: Entry, at: int) -> bool:
        """The same of one of its requests."""
        if entry.requests == 1:
            return self.cancel(entry)
        if entry.waiting:
            self._count(entry, -1)
            entry.drop(at)
            self._count(entry, 1)
        return entry.waiting

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
        if taken.entries:
            work = sum([e.rows for e in taken.entries]) * max([1, *[e.elements for e in taken.entries]])
            self.running[lane] = work, self.clock()
        return taken

    def finish(self, seconds: float, lane: int = 0) -> None:
        """The batch that was taken is done; it took `seconds`, 0 if that is no measurement."""
        work, _ = self.running.pop(lane, (0, 0.0))
        if work and seconds > 0:
            self.finished = self.clock()
            self.speed.observe(work, seconds)

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
            while queue and (
                not queue[0][3].waiting or self._hopeless(queue[0][3], now, alone=self.requests == 1)
            ):
                entry = queue[0][3]
                if entry.waiting and self.requests == entry.requests > 1 and entry.deadline > now:
                    entry = entry.take(entry.requests - 1)  # the last of them is tried
                else:
                    heapq.heappop(queue)
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

    def _delay(self, queue: list[Item]) -> float | None:
        delay = self.limits.max_delay_us / 1e6
        if not delay or self.draining:
            return None
        waiting = [item[3] for item in queue if item[3].waiting]
        left = min(entry.arrived for entry in waiting) + delay - self.clock()
        return left if left > 0 and sum(entry.rows for entry in waiting) < self.max_batch else None

    def _fill(self, queue: list[Item], taken: Taken) -> None:
        """As much as fits, and as leaves everybody in time who can be; what does not fit keeps its place."""
        rows, widest, bound, promises = 0, 1, math.inf, None
        passed: list[Item] = []
        now, key, short = self.clock(), queue[0][3].key, "full"
        while queue and rows < self.max_batch and len(passed) < LOOK_PAST:
            item = heapq.heappop(queue)
            entry = item[3]
            if not entry.waiting:
                self._dead -= 1
                continue
            if self._hopeless(entry, now, alone=not rows and self.requests == 1):
                self._leave(entry)
                taken.expired.append(entry)
                continue
            wider, own = max(widest, entry.elements), self._in_time(entry, now)
            each = entry.rows // entry.requests
            fit = (min(self.max_batch, self.limits.max_batch_elements // wider) - rows) // each
            fit = min(max(fit, 0 if rows else 1), entry.requests)
            if fit and rows + fit > 1:
                least = taken.entries[0].least if rows else entry.least
                promises = promises or Promises(self._others(key), self, now, least)
                room = min(bound, own, promises.room(item[:2]))
                if (rows + fit * each) * wider > room:
                    short, fit = "deadline", max(int((room / wider - rows) // each), 0 if rows else 1)
            if fit < entry.requests:
                passed.append(item)
                if not fit:
                    continue
                entry = entry.take(fit)
            self._leave(entry)
            taken.entries.append(entry)
            rows, widest, bound = rows + entry.rows, wider, min(bound, own)
        for item in passed:
            heapq.heappush(queue, item)
        taken.reason = "full" if rows >= self.max_batch else short if passed else "idle"

    def _others(self, key: Hashable) -> Iterator[Item]:
        """What waits and is of another key."""
        queues = [queue for name, queue in self._queues.items() if name != key]
        return (item for queue in queues for item in queue if item[3].waiting)

    def _hopeless(self, entry: Entry, now: float, *, alone: bool) -> bool:
        """Its time ran out, or will before it is done, at the cost of others: `alone` it is tried, which also tells
        whether the speed is still what it was."""
        return entry.deadline <= now + (0.0 if alone else self.speed.seconds(entry.least))

    def _in_time(self, entry: Entry, now: float) -> float:
        """The most work of a batch with which this is in time: surely, else probably, else it does not matter."""
        left, speed = entry.deadline - now, self.speed
        for seconds in (left, left * speed.caution):
            if (most := speed.work_within(seconds)) >= entry.least:
                return most
        return math.inf

    def _leave(self, entry: Entry) -> None:
        entry.waiting = False
        self._count(entry, -1)

    def _count(self, entry: Entry, sign: int) -> None:
        self.requests += sign * entry.requests
        self.rows += sign * entry.rows
        self.bytes += sign * entry.size_bytes
        rows, work = self._waiting.get(entry.priority, (0, 0))
        if rows + sign * entry.rows:
            self._waiting[entry.priority] = rows + sign * entry.rows, work + sign * entry.work
        else:
            self._waiting.pop(entry.priority, None)

    def _sweep(self) -> None:
        for key, queue in list(self._queues.items()):
            self._queues[key] = alive = [item for item in queue if item[3].waiting]
            heapq.heapify(alive)
            if not alive:
                del self._queues[key]
        self._dead = 0
