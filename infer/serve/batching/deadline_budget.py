"""Limit on the work of a batch, so that items which wait for its end still meet their deadlines."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable

from .interfaces import QueueState, TenantState
from .queue_items import HeapEntry, Urgency


class DeadlineBudget:
    """Time that a batch may take before `waiting` items, which cannot join it, miss their deadlines.

    The batch starts `now` and holds at least `work`. The waiting items are expected to run after it in order of
    urgency, each batch key in one batch, on all executors.
    """

    def __init__(self, waiting: Iterable[HeapEntry], queue: QueueState, now: float, work: float) -> None:
        self._waiting = sorted(waiting, key=lambda entry: entry[:3], reverse=True)
        self._latency, self._now, self._num_executors = queue.latency, now, queue.num_executors
        self._least = queue.latency.seconds(work) * queue.latency.caution
        self._kinds, self._work, self._slack = set[Hashable](), 0.0, math.inf

    def max_work(self, urgency: Urgency) -> float:
        """Return the most work of the batch with which every more urgent waiting item still meets its deadline.

        Items that miss it in any case do not count. Call with ever less urgent values: items are consumed.
        """
        latency = self._latency
        while self._waiting and self._waiting[-1][:2] < urgency:
            item = self._waiting.pop()[3]
            kinds = len(self._kinds | {item.key})
            for _ in range(item.requests):
                work = self._work + item.work_per_request
                seconds = latency.seconds(work, kinds) * latency.caution / self._num_executors
                slack = item.deadline - self._now - seconds
                if slack < self._least:
                    break
                self._kinds.add(item.key)
                self._work, self._slack = work, min(self._slack, slack)
        return latency.work_within(self._slack)


class FairDeadlineBudget:
    """Deadline budgets of tenants that fill a batch of key `kind` in the order of their service counters."""

    def __init__(self, tenants: Iterable[TenantState], kind: Hashable, queue: QueueState, now: float) -> None:
        self._tenants, self._kind, self._queue, self._now = list(tenants), kind, queue, now
        self._next: list[tuple[TenantState, HeapEntry]] | None = None
        self._budgets: dict[str, tuple[DeadlineBudget, DeadlineBudget]] = {}

    def max_work(self, tenant: TenantState, entry: HeapEntry, served: float, work: float) -> float:
        """Return the most work of the batch with which all items that go before `entry` meet their deadlines.

        These are more urgent items of its tenant, and the next item of each tenant with a counter below `served`.
        `work`: least work of the batch, as for `DeadlineBudget`.
        """
        if not self._next_of_each():
            return math.inf
        budgets = self._budgets.get(tenant.name)
        if budgets is None:
            others = [first for other, first in self._next_of_each() if other is not tenant]
            options = self._queue, self._now, work
            budgets = DeadlineBudget(tenant.items(self._kind), *options), DeadlineBudget(others, *options)
            self._budgets[tenant.name] = budgets
        return min(budgets[0].max_work(entry[:2]), budgets[1].max_work((served, 0.0)))

    def _next_of_each(self) -> list[tuple[TenantState, HeapEntry]]:
        """Return the most urgent item of each tenant, with the tenant's counter as its urgency."""
        if self._next is None:
            self._next = []
            for number, tenant in enumerate(self._tenants):
                first = min(tenant.items(self._kind), default=None, key=lambda entry: entry[:3])
                if first is not None:
                    self._next.append((tenant, (tenant.served, 0.0, number, first[3])))
        return self._next
