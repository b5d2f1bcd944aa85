"""Fair queue of tenants: order of service, refusals, and no effect with one tenant."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from infer.errors import OverloadedError, TooLargeError
from infer.serve.batching.batch_queue import MOST_BEHIND
from infer.serve.batching.queue_items import QueueItem
from infer.serve.fast_path.fast_request import GroupItem
from tests.serve.batching.test_queue_items import Owner
from tests.support.manual_clock_queue import ManualClockQueue

LIMITS = {"max_queue_requests": 10_000, "max_queue_rows": 100_000, "max_wait_seconds": 1e6}


def served(clocked: ManualClockQueue, tenant: str) -> float:
    return clocked.queue.tenant(tenant).served


def tenants(items: list[QueueItem]) -> list[str]:
    return [item.tenant for item in items]


def refused(clocked: ManualClockQueue, rows: int = 1, **how: Any) -> OverloadedError:
    with pytest.raises(OverloadedError) as caught:
        clocked.put(rows, **how)
    return caught.value


def party(clocked: ManualClockQueue, tenant: str, requests: int, timeout: float = 60) -> QueueItem:
    """Queue requests of one row each as one item."""
    rows, deadline = np.zeros((requests, 1)), clocked.clock.now + timeout
    owner = Owner([f"{tenant}{at}" for at in range(requests)])
    sizes = requests, 4, 16 * requests
    item = GroupItem({"x": rows}, {}, "k", *sizes, deadline, 2, owner, 0, requests=requests, tenant=tenant)
    clocked.admit([item])
    return item


class Reference:
    """One request at a time: of the least served tenant the most urgent one, of the kind of the first."""

    def __init__(self, max_batch: int, cost: float) -> None:
        self.max_batch, self.cost = max_batch, cost
        self.waiting: list[QueueItem] = []
        self.served: dict[str, float] = {}
        self.last = ""

    def put(self, item: QueueItem) -> None:
        active = {one.tenant for one in self.waiting}
        if item.tenant not in active:
            least = min((self.served[one] for one in active), default=self.served.get(self.last, 0.0))
            self.served[item.tenant] = max(self.served.get(item.tenant, 0.0), least)
        self.waiting.append(item)

    def cancel(self, item: QueueItem) -> None:
        self.waiting.remove(item)
        if item.tenant not in {one.tenant for one in self.waiting}:
            self.last = item.tenant

    def take(self, order: list[str]) -> list[QueueItem]:
        """`order`: the tenants, by which ties are broken."""
        batch: list[QueueItem] = []
        counters = dict(self.served)

        def urgent(item: QueueItem) -> tuple[int, float, int]:
            return item.priority, item.deadline, item.index

        while self.waiting and len(batch) < self.max_batch:
            left = [e for e in self.waiting if e not in batch and (not batch or e.key == batch[0].key)]
            if not left:
                break
            least = min({e.tenant for e in left}, key=lambda name: (counters[name], order.index(name)))
            mine = [e for e in left if e.tenant == least]
            batch.append(min(mine, key=urgent))
            counters[least] += self.cost
        for item in batch:
            self.served[item.tenant] += self.cost
        left = {e.tenant for e in self.waiting if e not in batch}
        if len(left) > 1:
            most = min(self.served[name] for name in left) + MOST_BEHIND * 8 * self.cost
            self.served |= {name: min(self.served[name], most) for name in left}
        done = [name for name in order if any(e.tenant == name for e in batch)]
        for item in batch:
            self.waiting.remove(item)
        for item in batch:
            if item.tenant in done and not any(e.tenant == item.tenant for e in self.waiting):
                self.last = item.tenant
        return batch


@pytest.mark.parametrize("seed", range(30))
def test_batches_are_those_of_the_slow_reference(seed: int) -> None:
    dice, clocked = random.Random(seed), ManualClockQueue(max_batch=4, **LIMITS)
    clocked.measured(0.0, 0.25)  # a power of two, so that both sides count the same
    reference = Reference(4, 0.25)
    number = taken = 0
    for _ in range(300):
        action = dice.random()
        if action < 0.7:
            number += 1
            tenant = dice.choice("aaaaaaab" if seed % 2 else "aaabbc")
            options = {"key": dice.choice("kkl"), "priority": dice.choice([1, 2, 2]), "timeout": 1e6 + number}
            item = clocked.put(tenant=tenant, **options)
            item.index = number
            reference.put(item)
        elif action < 0.75 and reference.waiting:
            item = dice.choice(reference.waiting)
            reference.cancel(item)
            assert clocked.queue.cancel(item)
        else:
            expected = reference.take(list(clocked.queue.active))
            found = clocked.run(0.0)
            taken += len(found)
            assert sorted(e.index for e in found) == sorted(e.index for e in expected)
            assert {n: served(clocked, n) for n in reference.served} == pytest.approx(reference.served)
    assert taken > 100


@pytest.mark.parametrize("seed", range(20))
def test_idle_tenants_do_not_change_the_service_of_another(seed: int) -> None:
    dice, limits = random.Random(seed), {"max_queue_requests": 12, "max_batch_elements": 96}
    alone, shared = ManualClockQueue(max_batch=8, **limits), ManualClockQueue(max_batch=8, **limits)
    pairs: list[tuple[QueueItem, QueueItem]] = []
    for clocked in (alone, shared):
        clocked.measured(0.01, 0.02)
    for tenant in "xy":
        shared.put(tenant=tenant)
        shared.run(0.0)
    for _ in range(150):
        if dice.random() < 0.7:
            rows = dice.randint(1, 3)
            options: dict[str, Any] = {
                "elements": dice.choice([1, 4, 16]),
                "timeout": dice.choice([0.05, 0.2, 0.5, 60]),
                "priority": dice.choice([1, 2, 2, 2]),
                "key": dice.choice("kkl"),
            }
            items: list[QueueItem | str] = []
            for clocked in (alone, shared):
                try:
                    items.append(clocked.put(rows, **options))
                except OverloadedError as error:
                    items.append(f"{error.retry_after:.6f}")
            if isinstance(items[0], QueueItem) and isinstance(items[1], QueueItem):
                pairs.append((items[0], items[1]))
            else:
                assert items[0] == items[1]
        elif pairs and dice.random() < 0.2:
            one, two = dice.choice(pairs)
            assert alone.queue.cancel(one) == shared.queue.cancel(two)
        else:
            numbers = [{id(pair[side]): at for at, pair in enumerate(pairs)} for side in (0, 1)]
            first, second = alone.queue.take(), shared.queue.take()
            for mine, theirs in ((first.items, second.items), (first.expired, second.expired)):
                assert [numbers[0][id(e)] for e in mine] == [numbers[1][id(e)] for e in theirs]
            assert first.reason == second.reason
            for clocked in (alone, shared):
                clocked.clock.now += 0.03
                clocked.queue.finish(0.0)


def test_tenants_with_enough_waiting_are_served_equally() -> None:
    clocked = ManualClockQueue(max_batch=4, **LIMITS)
    clocked.measured(0.01, 0.01)
    for _ in range(300):
        clocked.put(tenant="flood", priority=1)
    for _ in range(30):
        clocked.put(tenant="polite")
        clocked.put(tenant="third")
    found = Counter(tenants([e for _ in range(22) for e in clocked.run(0.05)]))
    assert set(found) == {"flood", "polite", "third"}
    assert max(found.values()) - min(found.values()) <= 1
    assert max(served(clocked, n) for n in found) - min(served(clocked, n) for n in found) < 0.02


def test_a_share_is_counted_in_predicted_seconds_not_in_requests() -> None:
    clocked = ManualClockQueue(max_batch=4, **LIMITS)
    clocked.measured(0.0, 0.01)
    for _ in range(40):
        clocked.put(4, tenant="wide")
        for _ in range(4):
            clocked.put(1, tenant="narrow")
    batches = [clocked.run(0.04) for _ in range(40)]
    rows = Counter(
        {name: sum(e.rows for b in batches for e in b if e.tenant == name) for name in ("wide", "narrow")}
    )
    assert abs(rows["wide"] - rows["narrow"]) <= 4


def test_a_polite_tenant_is_in_the_next_batch_of_a_flood() -> None:
    clocked = ManualClockQueue(max_batch=4, **LIMITS)
    clocked.measured(0.01, 0.01)
    for _ in range(100):
        clocked.put(tenant="flood", priority=1)
    for _ in range(10):
        clocked.run(0.05)
        polite = clocked.put(tenant="polite", priority=200)
        assert polite in clocked.run(0.05)


def test_a_batch_is_filled_with_items_of_all_tenants() -> None:
    clocked = ManualClockQueue(max_batch=8, **LIMITS)
    for _ in range(20):
        clocked.put(tenant="flood")
    clocked.put(tenant="polite")
    assert Counter(tenants(clocked.run(0.1))) == {"flood": 7, "polite": 1}


def test_an_idle_tenant_saves_up_no_service() -> None:
    clocked = ManualClockQueue(max_batch=1, **LIMITS)
    clocked.measured(0.1, 0.0)
    clocked.put(tenant="idle")
    clocked.run(0.1)
    for _ in range(50):
        clocked.put(tenant="busy")
        clocked.run(0.1)
    for _ in range(10):
        clocked.put(tenant="busy")
        clocked.put(tenant="idle")
    found = tenants([e for _ in range(10) for e in clocked.run(0.1)])
    assert Counter(found) == {"busy": 5, "idle": 5}


def test_use_of_idle_capacity_is_hardly_charged_later() -> None:
    clocked = ManualClockQueue(max_batch=8, **LIMITS)
    clocked.measured(0.0, 0.01)
    for _ in range(1000):
        clocked.put(tenant="flood")
    clocked.put(tenant="rare", key="other", priority=200)
    for _ in range(50):  # it always waits, and gets all it asks for
        clocked.put(tenant="rare")
        assert Counter(tenants(clocked.run(0.08))) == {"flood": 7, "rare": 1}
    for _ in range(500):
        clocked.put(tenant="rare")
    found = Counter(tenants([e for _ in range(10) for e in clocked.run(0.08)]))
    assert found["flood"] > 20


def test_an_overcharged_batch_has_no_lasting_effect() -> None:
    clocked = ManualClockQueue(max_batch=1, **LIMITS)
    clocked.measured(1.0, 0.0)
    for tenant in ("a", "b") * 20:
        clocked.put(tenant=tenant)
    clocked.run(0.001)
    found = tenants([e for _ in range(20) for e in clocked.run(0.001)])
    assert abs(Counter(found)["a"] - Counter(found)["b"]) <= 4


def test_priority_orders_the_requests_of_one_tenant_only() -> None:
    clocked = ManualClockQueue(max_batch=1, **LIMITS)
    clocked.measured(0.1, 0.0)
    late, soon = clocked.put(tenant="a", priority=200), clocked.put(tenant="a", priority=100)
    urgent = [clocked.put(tenant="b", priority=1) for _ in range(5)]
    order = [clocked.run(0.1)[0] for _ in range(7)]
    assert [e for e in order if e.tenant == "a"] == [soon, late]
    assert [e for e in order if e.tenant == "b"] == urgent
    assert order.index(late) <= 3


def test_grouped_requests_of_two_tenants_share_a_batch_equally() -> None:
    clocked = ManualClockQueue(max_batch=8, **LIMITS)
    clocked.measured(0.01, 0.01)
    flood = [party(clocked, "flood", 8) for _ in range(3)]
    polite = party(clocked, "polite", 5)
    found = clocked.run(0.1)
    assert [(e.tenant, e.owner.requests) for e in found] == [
        ("flood", ["flood0", "flood1", "flood2", "flood3"]),
        ("polite", ["polite0", "polite1", "polite2", "polite3"]),
    ]
    assert (flood[0].requests, polite.requests, clocked.queue.requests) == (4, 1, 21)
    assert clocked.queue.drop(polite, 0)
    assert "polite" not in clocked.queue.active
    assert [e.rows for e in clocked.run(0.1)] == [4, 4]


def test_a_tenant_beyond_its_share_of_a_full_queue_is_refused_first() -> None:
    clocked = ManualClockQueue(max_queue_requests=10)
    for _ in range(10):
        clocked.put(tenant="flood")
    assert "holds 10 requests" in str(refused(clocked, tenant="flood"))
    for _ in range(5):
        clocked.put(tenant="polite")
    assert "15 requests, 5 of them of this API key, whose share is 5" in str(
        refused(clocked, tenant="polite")
    )
    refused(clocked, tenant="flood")
    for _ in range(6):
        clocked.run(0.1)
    assert clocked.queue.requests == 0
    for _ in range(10):
        clocked.put(tenant="polite")


def test_rows_and_bytes_are_shared_and_never_more_than_twice_the_limit() -> None:
    clocked = ManualClockQueue(max_queue_rows=12, max_queue_bytes=12 * 16)
    errors = []
    for number in range(50):
        for _ in range(12):
            try:
                clocked.put(tenant=f"t{number}")
            except OverloadedError as error:
                errors.append(str(error))
    assert all("twice its limit" in error or "whose share is" in error for error in errors)
    assert "whose share is 6" in errors[0]
    assert clocked.queue.rows == 24
    with pytest.raises(TooLargeError):
        clocked.put(13, tenant="t1")


def test_a_flood_delays_other_tenants_by_at_most_its_share() -> None:
    clocked = ManualClockQueue(max_batch=4)
    clocked.measured(0.0, 0.01)
    for _ in range(100):
        clocked.put(tenant="flood")
    for _ in range(100):
        assert refused(clocked, tenant="flood").retry_after > 0.9
    assert clocked.wait(tenant="flood") == pytest.approx(1.0, abs=0.02)
    assert clocked.wait(tenant="polite") == 0
    clocked.put(2, tenant="polite", timeout=0.05)
    assert clocked.wait(tenant="polite") == pytest.approx(0.04)
    assert not clocked.overloaded("polite")
    assert "polite" in tenants(clocked.run(0.04))


def test_a_batch_stops_growing_where_another_tenant_would_be_late() -> None:
    clocked = ManualClockQueue(max_batch=64, max_wait_seconds=9)
    clocked.measured(0.0, 0.01)
    for _ in range(60):
        clocked.put(tenant="flood")
    polite = clocked.put(tenant="polite", key="other", timeout=0.2)
    assert 10 < len(clocked.run(0.18)) < 20
    assert clocked.run(0.01) == [polite]


def test_expired_items_of_every_tenant_are_reported() -> None:
    clocked = ManualClockQueue(max_batch=4)
    dead, gone, alive = clocked.put(tenant="a", timeout=1), clocked.put(tenant="b"), clocked.put(tenant="b")
    clocked.queue.cancel(gone)
    clocked.clock.now += 2
    taken = clocked.queue.take()
    assert (taken.items, taken.expired) == ([alive], [dead])
    assert clocked.queue.active == {}
    assert (clocked.queue.requests, clocked.queue.rows, clocked.queue.bytes) == (0, 0, 0)
    assert clocked.wait(tenant="b") == 0


def test_stopping_clears_the_items_of_all_tenants() -> None:
    clocked = ManualClockQueue()
    items = [clocked.put(tenant="a"), clocked.put(tenant="b", key="other")]
    assert clocked.queue.clear() == items
    assert (clocked.queue.requests, clocked.queue.kinds) == (0, 0)


def test_a_delayed_batch_fills_with_items_of_any_tenant() -> None:
    clocked = ManualClockQueue(max_batch=2, max_delay_us=10_000)
    first = clocked.put(tenant="a")
    assert clocked.queue.take().wait == pytest.approx(0.01)
    second = clocked.put(tenant="b")
    assert clocked.queue.take().items == [first, second]
