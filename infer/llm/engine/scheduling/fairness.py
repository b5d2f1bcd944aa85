"""Fair shares of the engine: the choice of the next sequence to admit and of the next one to preempt.

Tenants are served by virtual token counters (Sheng et al., "Fairness in serving large language models", 2024): the
tenant that was served the fewest tokens is next. Within a tenant requests are ordered by rank (arrival, shifted by
priority), but one admission in `OLDEST_EVERY` goes to the request that has waited longest. A tenant that runs at least
two sequences fewer than another one preempts one of them. So priorities order the requests of one tenant, and no
request starves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Many

from ..sequence import Sequence

OLDEST_EVERY = 4  # one place in so many goes to the request of a tenant that has waited longest
OUTPUT_COST = 2  # tokens of a prompt that cost what one token of output does
MAX_TENANTS = 4096  # remembered


class FairShares:
    """Virtual token counters.

    `served`: tokens per tenant, raised to the least of the active ones when it becomes active.
    """

    def __init__(self) -> None:
        self.served: dict[str, float] = {}
        self._turns: dict[str, int] = {}  # sequences admitted

    def on_arrival(self, tenant: str, others: Iterable[Sequence]) -> None:
        """Mark a tenant as active, without credit for the time in which it had no request.

        `others`: the sequences that wait or run already.
        """
        active = {sequence.tenant for sequence in others}
        if tenant in active:
            return
        least = min((self.served.get(other, 0.0) for other in active), default=0.0)
        if len(self.served) >= MAX_TENANTS:
            self._shrink(active)
        self.served[tenant] = max(self.served.get(tenant, 0.0), least)

    def charge(self, sequence: Sequence, tokens: int, *, output: bool) -> None:
        """Add tokens to the tenant's counter; the last of them is an output token where `output`."""
        cost = tokens - 1 + OUTPUT_COST if output else tokens
        self.served[sequence.tenant] = self.served.get(sequence.tenant, 0.0) + cost

    def next_to_admit(self, waiting: Many[Sequence]) -> Sequence:
        """Return the next sequence to admit; `waiting` is in order of rank."""
        heads: dict[str, Sequence] = {}
        for sequence in waiting:
            heads.setdefault(sequence.tenant, sequence)
        tenant = min(heads, key=lambda name: (self.served.get(name, 0.0), arrival_order(heads[name])))
        if self._is_oldest_next(tenant):
            return min((s for s in waiting if s.tenant == tenant), key=arrival_order)
        return heads[tenant]

    def on_admission(self, sequence: Sequence) -> None:
        """Note that a sequence was admitted; one admitted for its age is not preempted for a priority."""
        if self._is_oldest_next(sequence.tenant):
            sequence.rank = (-math.inf, *sequence.rank[1:])
        self._turns[sequence.tenant] = self._turns.get(sequence.tenant, 0) + 1

    def next_to_preempt(self, running: Many[Sequence]) -> Sequence:
        """Return the first sequence to preempt: of a tenant with more than others, else the latest arrival."""
        places = _places(running)
        return max(running, key=lambda sequence: (places[id(sequence)], arrival_order(sequence)))

    def victim_for(self, first: Sequence, running: Many[Sequence], lacking: int) -> Sequence | None:
        """Return a running sequence that `first` may preempt, where `lacking` pages are missing, or None."""
        places = _places(running)
        held = sum(sequence.tenant == first.tenant for sequence in running)
        beyond = [s for s in running if s.tenant != first.tenant and places[id(s)] > held]
        if beyond and sum(len(s.pages) for s in beyond) >= lacking:
            return max(beyond, key=lambda sequence: (places[id(sequence)], arrival_order(sequence)))
        own = next((s for s in reversed(running) if s.tenant == first.tenant), None)
        if own is None or own.rank < first.rank:
            return None
        return own if first.state.request.priority < own.state.request.priority else None

    def prefill_key(self, sequence: Sequence) -> tuple[float, int, int, tuple[float, int, int]]:
        """Return the sort key of prefills: least served tenant, priority, fewest tokens left."""
        left = len(sequence.tokens) - sequence.num_computed_tokens
        served = self.served.get(sequence.tenant, 0.0)
        return served, sequence.state.request.priority, left, sequence.rank

    def _is_oldest_next(self, tenant: str) -> bool:
        return self._turns.get(tenant, 0) % OLDEST_EVERY == OLDEST_EVERY - 1

    def _shrink(self, active: set[str]) -> None:
        """Drop the idle tenants with the smallest counters; they would restart at the least of the active ones."""
        idle = sorted(set(self.served) - active, key=lambda name: self.served[name])
        for name in idle[: MAX_TENANTS // 2]:
            del self.served[name]
            self._turns.pop(name, None)


def arrival_order(sequence: Sequence) -> tuple[float, int, int]:
    """Return the sort key of arrival, without priority."""
    return sequence.state.arrival, sequence.rank[1], sequence.index


def _places(running: Many[Sequence]) -> dict[int, int]:
    """Count, for each sequence, the sequences of its tenant with a lower rank."""
    counts: dict[str, int] = {}
    places = {}
    for sequence in running:
        places[id(sequence)] = counts[sequence.tenant] = counts.get(sequence.tenant, -1) + 1
    return places
