"""Shares of the queue of tensors: who is next, who is turned away, and that one tenant alone notices nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest

from infer.serve.entries import Entry
from infer.serve.fair_queue import FairBatcher
from infer.serve.limits import ServeLimits
from tests.serve_desk import Clock, Desk

LIMITS = {"max_queue_requests": 10_000, "max_queue_rows": 100_000, "max_wait_seconds": 1e6}


class FairDesk(Desk):
    """The desk of a queue with tenants."""

    def __init__(self, max_batch: int = 4, lanes: int = 1, **limits: Any) -> None:
        self.clock = Clock()
        self.fair = FairBatcher(max_batch, ServeLimits(**limits), self.clock, lanes)
        self.batcher, self.speed = self.fair, self.fair.speed
        self.door = self.fair.door

    def served(self, tenant: str) -> float:
        return self.fair.part(tenant).served


def tenants(entries: list[Entry]) -> list[str]:
    return [entry.tenant for entry in entries]


class Reference:
    """One request at a time: of the least served tenant the most urgent one, of the kind of the first."""

    def __init__(self, max_batch: int, cost: float) -> None:
        self.max_batch, self.cost = max_batch, cost
        self.waiting: list[Entry] = []
        self.served: dict[str, float] = {}
        self.last = ""

    def put(self, entry: Entry) -> None:
        active = {one.tenant for one in self.waiting}
        if entry.tenant not in active:
            least = min((self.served[one] for one in active), default=self.served.get(self.last, 0.0))
            self.served[entry.tenant] = max(self.served.get(entry.tenant, 0.0), least)
        self.waiting.append(entry)

    def cancel(self, entry: Entry) -> None:
        self.waiting.remove(entry)
        if entry.tenant not in {one.tenant for one in self.waiting}:
            self.last = entry.tenant

    def take(self, order: list[str]) -> list[Entry]:
        """`order`: the tenants, by which ties are broken."""
        batch: list[Entry] = []
        counters = dict(self.served)

        def urgent(entry: Entry) -> tuple[int, float, int]:
            return entry.priority, entry.deadline, entry.index

        while self.waiting and len(batch) < self.max_batch:
            left = [e for e in self.waiting if e not in batch and (not batch or e.key == batch[0].key)]
            if not left:
                break
            least = min({e.tenant for e in left}, key=lambda name: (counters[name], order.index(name)))
            mine = [e for e in left if e.tenant == least]
            batch.append(min(mine, key=urgent))
            counters[least] += self.cost
        for entry in batch:
            self.served[entry.tenant] += self.cost
        done = [name for name in order if any(e.tenant == name for e in batch)]
        for entry in batch:
            self.waiting.remove(entry)
        for entry in batch:
            if entry.tenant in done and not any(e.tenant == entry.tenant for e in self.waiting):
                self.last = entry.tenant
        return batch


@pytest.mark.parametrize("seed", range(30))
def test_batches_are_those_of_the_slow_reference(seed: int) -> None:
    dice, desk = random.Random(seed), FairDesk(max_batch=4, **LIMITS)
    desk.measured(0.0, 0.25)  # a power of two, so that both sides count the same
    reference = Reference(4, 0.25)
    number = taken = 0
    for _ in range(300):
        action = dice.random()
        if action < 0.7:
            number += 1
            tenant = dice.choice("aaaaaaab" if seed % 2 else "aaabbc")
            options = {"key": dice.choice("kkl"), "priority": dice.choice([1, 2, 2]), "timeout": 1e6 + number}
            entry = desk.put(tenant=tenant, **options)
            entry.index = number
            reference.put(entry)
        elif action < 0.75 and reference.waiting:
            entry = dice.choice(reference.waiting)
            reference.cancel(entry)
            assert desk.batcher.cancel(entry)
        else:
            expected = reference.take(list(desk.fair.active))
            found = desk.run(0.0)
            taken += len(found)
            assert sorted(e.index for e in found) == sorted(e.index for e in expected)
            assert {n: desk.served(n) for n in reference.served} == pytest.approx(reference.served)
    assert taken > 100
