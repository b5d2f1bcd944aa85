"""A queue of tensors that several API keys share: equal service, and a part of the places for each.

Each tenant has a counter of the seconds it was served, as `Speed` predicts them for its rows. The tenant with the
lowest counter is next, within a batch too, whatever priority others ask for; one that comes back starts at the lowest
counter of those that wait, so that nobody saves up service while it asks for nothing. (Virtual token counters: Sheng et
al., Fairness in serving large language models, OSDI 2024, with predicted seconds for tokens.) Within a tenant the order
is that of `Waiting`. A batch is filled as far as anybody's work fits: shares only matter while more waits than fits.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain
from typing import Any

from ...llm.engine.quota import is_beyond_share
from .admission import LEAST_PRIORITY, Door
from .deadline_budget import Item, Rooms
from .queue import LOOK_PAST, Batcher, Filling, Taken
from .queue_items import Entry
from .waiting_items import Waiting

UNMEASURED = 1e-9  # seconds of one element, before the first batch was measured
MOST_BEHIND = 2  # longest batches that a tenant may have had more than another that waits too


class Part(Waiting):
    """The entries of one tenant; `served`: its counter, in seconds above those it missed while it asked for nothing."""

    def __init__(self, name: str, whole: FairBatcher) -> None:
        super().__init__(whole.clock, whole.speed)
        self.name, self.whole, self.served = name, whole, 0.0
        self.work = 0  # of what waits, as `Speed` counts it
        self.door = Door(whole, self)

    @property
    def everybody(self) -> int:
        return self.whole.requests

    def ahead(self, priority: int = LEAST_PRIORITY, deadline: float | None = None) -> tuple[float, float]:
        """Rows and work that go before new work of this tenant: its own, and of each other tenant at most as much."""
        rows, work = super().ahead(priority, deadline)
        before, active = work, self.whole.active
        if not before or (len(active) == 1 and self.requests):
            return rows, work
        for other in active.values():
            if other is not self:
                theirs = other.work
                if theirs <= before:
                    rows, work = rows + other.rows, work + theirs
                else:
                    rows, work = rows + before / theirs * other.rows, work + before
        return rows, work

    def full(self, requests: int, rows: int, size: int) -> str:
        """Why there is no place for so much more of this tenant; who has less than its part still finds one."""
        whole, limits = self.whole, self.whole.limits
        if (
            whole.requests + requests <= limits.max_queue_requests
            and whole.rows + rows <= limits.max_queue_rows
            and whole.bytes + size <= limits.max_queue_bytes
        ):
            return ""
        tenants = len(whole.active) + (self.name not in whole.active)
        for what, own, total, more, limit in (
            ("requests", self.requests, whole.requests, requests, limits.max_queue_requests),
            ("rows", self.rows, whole.rows, rows, limits.max_queue_rows),
            ("bytes", self.bytes, whole.bytes, size, limits.max_queue_bytes),
        ):
            if is_beyond_share(own + more, total + more, tenants, limit):
                if (own + more) * tenants <= limit:
                    return f"the queue holds {total} {what}, twice its limit"
                share = limit // tenants
                return (
                    f"the queue holds {total} {what}, {own} of them of this API key, whose share is {share}"
                )
        return ""

    def head(self, kind: Hashable, now: float, expired: list[Entry]) -> Item | None:
        """The most urgent entry of a kind that can be in time; those before it that can't be are let go."""
        queue = self._queues.get(kind)
        while queue:
            entry = queue[0][3]
            if not entry.waiting:
                self._dead -= 1
            elif self._hopeless(entry, now, alone=self.everybody == 1):
                self._leave(entry)
                expired.append(entry)
            else:
                return queue[0]
            heapq.heappop(queue)
        self._queues.pop(kind, None)
        return None

    def pop(self, kind: Hashable) -> Item:
        queue = self._queues[kind]
        item = heapq.heappop(queue)
        if not queue:
            del self._queues[kind]
        return item

    def push(self, item: Item) -> None:
        heapq.heappush(self._queues.setdefault(item[3].key, []), item)

    def _leave(self, entry: Entry) -> None:
        super()._leave(entry)
        if not self.requests:
            self.whole.rest(self)

    def _count(self, entry: Entry, sign: int) -> None:
        super()._count(entry, sign)
        self.work += sign * entry.work
        self.whole.count(entry, sign)


class FairBatcher(Batcher):
    """A `Batcher` with a `Part` for each tenant. Tenants are configured keys, never names that a client makes up.

    `active`: the tenants that wait, in the order in which they came.
    """

    def __init__(self, *options: Any, **more: Any) -> None:
        super().__init__(*options, **more)
        self.active: dict[str, Part] = {}
        self._parts: dict[str, Part] = {}
        self._last: Part | None = None  # that was the last to wait for nothing any more

    def part(self, tenant: str) -> Part:
        """That of a tenant, made when it first asks for something."""
        found = self._parts.get(tenant)
        if found is None:
            found = self._parts[tenant] = Part(tenant, self)
        return found

    def door_of(self, tenant: str) -> Door:
        return self.part(tenant).door

    @property
    def kinds(self) -> int:
        return len({kind for part in self.active.values() for kind in part._queues})

    def items(self, without: Hashable = None) -> Iterator[Item]:
        return chain.from_iterable([part.items(without) for part in self.active.values()])

    def rest(self, part: Part) -> None:
        """A tenant waits for nothing any more."""
        self.active.pop(part.name, None)
        self._last = part

    count = Waiting._count

    def _enter(self, entries: Sequence[Entry]) -> None:
        part = self.part(entries[0].tenant)
        if part.name not in self.active:
            least = min([other.served for other in self.active.values()], default=None)
            if least is None:
                least = self._last.served if self._last is not None else 0.0
            part.served = max(part.served, least)
            self.active[part.name] = part
        part._enter(entries)

    def cancel(self, entry: Entry) -> bool:
        return entry.waiting and self.part(entry.tenant).cancel(entry)

    def drop(self, entry: Entry, at: int) -> bool:
        return entry.waiting and self.part(entry.tenant).drop(entry, at)

    def clear(self) -> list[Entry]:
        return [entry for part in list(self.active.values()) for entry in part.clear()]

    def take(self, lane: int = 0) -> Taken:
        """The next batch: the most urgent entry of the tenant that was served least, and as much of its kind as fits,
        of each tenant in its turn."""
        taken = Taken()
        found = [(part, part._most_urgent(taken.expired)) for part in list(self.active.values())]
        urgent = [(part, kind) for part, kind in found if kind is not None]
        if not urgent:
            return taken
        _, kind = min(urgent, key=lambda one: one[0].served)
        taken.wait = self._delay([item for part, _ in urgent for item in part._queues.get(kind, ())])
        if taken.wait is None:
            self._fill_fairly(kind, taken)
            self._charge(taken.entries, self._run(taken, lane))
        return taken

    def _charge(self, entries: Sequence[Entry], work: float) -> None:
        """Each tenant pays for its part of the batch. Counters stay close, so that neither what was mispredicted nor
        what others left unused is made up for at length."""
        seconds = self.speed.seconds(work) or UNMEASURED * work
        each = seconds / max(sum([entry.work for entry in entries]), 1)
        for entry in entries:
            self._parts[entry.tenant].served += each * entry.work
        if len(self.active) > 1 and self.speed.longest:
            waiting = self.active.values()
            most = min([part.served for part in waiting]) + MOST_BEHIND * self.speed.longest
            for part in waiting:
                part.served = min(part.served, most)

    def _fill_fairly(self, kind: Hashable, taken: Taken) -> None:
        """As `_fill`, of the tenant that would have the lowest counter each time."""
        filling, now = Filling(), self.clock()
        joined: dict[Entry, int] = {}  # how many requests of each
        passed: list[tuple[Part, Item]] = []
        turns = [
            (part.served, number, part)
            for number, part in enumerate(self.active.values())
            if kind in part._queues
        ]
        heapq.heapify(turns)
        rooms = Rooms(self.active.values(), kind, self, now)
        elsewhere = sorted([part.served for part in self.active.values() if kind not in part._queues])

        def room() -> float:
            return rooms.before(part, item, served, next(iter(joined), entry).least)

        while turns and filling.rows < self.max_batch and len(passed) < LOOK_PAST:
            served, number, part = turns[0]
            head = part.head(kind, now, taken.expired)
            if head is None:
                heapq.heappop(turns)
                continue
            item, entry = head, head[3]
            most = left = entry.requests - joined.get(entry, 0)
            cost = 0.0
            if len(turns) > 1 or elsewhere:
                cost = self._cost(entry)
                later = elsewhere[bisect.bisect_left(elsewhere, served) :][:1]
                others = [turn[0] for turn in turns[1:3]] + later
                most = min(left, 1 + int((min(others) - served) / cost)) if others else left
            fit = self._fit(filling, entry, most, now, room)
            if fit:
                joined[entry] = joined.get(entry, 0) + fit
            if fit == left or fit < most:
                part.pop(kind)
            if fit < most:
                passed.append((part, item))
            if cost:
                heapq.heapreplace(turns, (served + fit * cost, number, part))
        taken.entries = [self._taken(entry, count) for entry, count in joined.items()]
        for part, item in passed:
            part.push(item)
        taken.reason = self._reason(filling, short=bool(passed))

    def _taken(self, entry: Entry, count: int) -> Entry:
        part = self.part(entry.tenant)
        if count < entry.requests:
            entry = entry.take(count)
        part._leave(entry)
        return entry

    def _cost(self, entry: Entry) -> float:
        """Seconds of one of its requests, in a full batch."""
        elements = max(entry.elements, 1)
        full = elements * max(min(self.max_batch, self.limits.max_batch_elements // elements), 1)
        return entry.least * (self.speed.seconds(full) / full or UNMEASURED)
