"""Fair shares of the engine: which sequence is admitted next, and which one gives its place up.

Tenants are served by virtual token counters (Sheng et al., "Fairness in serving large language models", 2024): the one
that was given the fewest tokens is next. Within a tenant requests go by rank (arrival, moved by priority), but one
place in `OLDEST` goes to the request that has waited longest. A tenant that holds fewer places than another by two or
more takes one from it. So priorities order the requests of one tenant, and starve nobody.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Many

from .sequence import Sequence

OLDEST = 4  # one place in so many goes to the request of a tenant that has waited longest
OUTPUT_COST = 2  # tokens of a prompt that cost what one token of output does
MOST_TENANTS = 4096  # remembered


class Shares:
    """`served`: tokens that each tenant was given, above what it missed while it asked for nothing."""

    def __init__(self) -> None:
        self.served: dict[str, float] = {}
        self._turns: dict[str, int] = {}  # sequences admitted

    def join(self, tenant: str, others: Iterable[Sequence]) -> None:
        """A request of this tenant comes, while these wait or run: it makes up for nothing that it did not ask for."""
        active = {sequence.tenant for sequence in others}
        if tenant in active:
            return
        least = min((self.served.get(other, 0.0) for other in active), default=0.0)
        if len(self.served) >= MOST_TENANTS:
            self._shrink(active)
        self.served[tenant] = max(self.served.get(tenant, 0.0), least)

    def charge(self, sequence: Sequence, tokens: int, *, output: bool) -> None:
        cost = tokens - 1 + OUTPUT_COST if output else tokens
        self.served[sequence.tenant] = self.served.get(sequence.tenant, 0.0) + cost

    def first(self, waiting: Many[Sequence]) -> Sequence:
        """The next to be admitted; `waiting` is in order of rank."""
        heads: dict[str, Sequence] = {}
        for sequence in waiting:
            heads.setdefault(sequence.tenant, sequence)
        tenant = min(heads, key=lambda name: (self.served.get(name, 0.0), arrived(heads[name])))
        if self._oldest_next(tenant):
            return min((s for s in waiting if s.tenant == tenant), key=arrived)
        return heads[tenant]

    def admitted(self, sequence: Sequence) -> None:
        """It left those that wait. Whoever was admitted for its age keeps its place whatever priority comes."""
        if self._oldest_next(sequence.tenant):
            sequence.rank = (-math.inf, *sequence.rank[1:])
        self._turns[sequence.tenant] = self._turns.get(sequence.tenant, 0) + 1

    def last(self, running: Many[Sequence]) -> Sequence:
        """The first to give up its place: of a tenant that holds more than others, else the one that came last."""
        places = _places(running)
        return max(running, key=lambda sequence: (places[id(sequence)], arrived(sequence)))

    def victim(self, first: Sequence, running: Many[Sequence], lacking: int) -> Sequence | None:
        """A running sequence whose place `first` may take, where `lacking` pages are missing; None without one."""
        places = _places(running)
        held = sum(sequence.tenant == first.tenant for sequence in running)
        beyond = [s for s in running if s.tenant != first.tenant and places[id(s)] > held]
        if beyond and sum(len(s.pages) for s in beyond) >= lacking:
            return max(beyond, key=lambda sequence: (places[id(sequence)], arrived(sequence)))
        own = next((s for s in reversed(running) if s.tenant == first.tenant), None)
        if own is None or own.rank < first.rank:
            return None
        return own if first.job.request.priority < own.job.request.priority else None

    def shortest(self, sequence: Sequence) -> tuple[float, int, int, tuple[float, int, int]]:
        """The order in which prompts are read, but for the one that has waited longest."""
        left = len(sequence.tokens) - sequence.computed
        served = self.served.get(sequence.tenant, 0.0)
        return served, sequence.job.request.priority, left, sequence.rank

    def _oldest_next(self, tenant: str) -> bool:
        return self._turns.get(tenant, 0) % OLDEST == OLDEST - 1

    def _shrink(self, active: set[str]) -> None:
        """Forget the idle tenants that were given least; they would begin at the least of the active ones."""
        idle = sorted(set(self.served) - active, key=lambda name: self.served[name])
        for name in idle[: MOST_TENANTS // 2]:
            del self.served[name]
            self._turns.pop(name, None)


def arrived(sequence: Sequence) -> tuple[float, int, int]:
    """The order of arrival, whatever the priority."""
    return sequence.job.arrival, sequence.rank[1], sequence.index


def _places(running: Many[Sequence]) -> dict[int, int]:
    """How many sequences of its tenant stand before each, in order of rank."""
    counts: dict[str, int] = {}
    places = {}
    for sequence in running:
        places[id(sequence)] = counts[sequence.tenant] = counts.get(sequence.tenant, -1) + 1
    return places
