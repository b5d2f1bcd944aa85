"""Fair shares: no tenant waits for long while others flood the engine with priorities, completions, long prompts."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest

from infer.errors import InputError, OverloadedError
from infer.llm.engine.engine import Engine
from infer.llm.engine.requests import Request
from infer.llm.engine.sampling.sampling_options import Sampling
from infer.llm.engine.scheduling.engine_limits import EngineLimits, is_beyond_share
from infer.llm.engine.scheduling.fairness import MAX_TENANTS, FairShares
from infer.llm.engine.sequence import RequestState, Sequence
from tests.support.fake_step import VOCABULARY, FakeStep, fake_shape

pytestmark = pytest.mark.usefixtures("one_thread")
PAGE = 4


class Clocked:
    """An engine of a step that costs nothing, and a clock that moves a tenth of a second at each step."""

    def __init__(self, pages: int = 600, **limits: Any) -> None:
        shape, self.now = fake_shape(PAGE), 0.0
        self.engine = Engine(
            FakeStep(PAGE), shape, tokenizer=None, eos_ids=[], limits=EngineLimits(**limits),
            kv_bytes=pages * shape.layers * shape.page_bytes, clock=lambda: self.now,
        )  # fmt: skip
        self.tokens: Counter[str] = Counter()  # of output, by tenant
        self.finished: dict[str, int] = {}  # the number of the step, by request
        self.steps = self._number = 0
        self._left: dict[str, int] = {}

    def ask(self, tenant: str, *, tokens: int = 1, prompt: int = 6, n: int = 1, priority: int = 0) -> str:
        self._number += 1
        id = f"{tenant}/{self._number}"
        ids = [3 + (7 * self._number + i * i) % (VOCABULARY - 3) for i in range(prompt)]
        sampling = Sampling(temperature=0, max_tokens=tokens, ignore_eos=True, n=n)
        request = Request(id=id, prompt=ids, sampling=sampling, priority=priority, tenant=tenant)
        self.engine.submit(request)
        self._left[id] = n
        return id

    def fill(self, tenant: str) -> None:
        """Ask until the tenant is turned away."""
        with contextlib.suppress(OverloadedError):
            for _ in range(30):
                self.ask(tenant, tokens=20)
            pytest.fail("nobody was turned away")

    def step(self) -> None:
        self.steps, self.now = self.steps + 1, self.now + 0.1
        for output in self.engine.step():
            assert output.finish != "error", output
            self.tokens[output.id.partition("/")[0]] += len(output.token_ids)
            if output.finish:
                self._left[output.id] -= 1
                if not self._left[output.id]:
                    self.finished[output.id] = self.steps

    def until(self, id: str, most: int) -> int:
        """Count the steps until it is finished."""
        for count in range(1, most + 1):
            self.step()
            if id in self.finished:
                return count
        pytest.fail(f"{id} is not finished after {most} steps")


@pytest.mark.parametrize("invariant", [False, True])
def test_a_flood_of_high_priority_holds_up_no_other_tenant(invariant: bool) -> None:
    clocked = Clocked(step_tokens=64, max_running=16, batch_invariant=invariant)
    for _ in range(24):
        clocked.ask("flood", tokens=60, n=8, priority=-100)
    for _ in range(20):
        clocked.step()
    for _ in range(5):
        assert clocked.until(clocked.ask("quiet"), 12) <= 8
        clocked.ask("flood", tokens=60, n=8, priority=-100)
    clocked.engine.check_integrity()


def test_a_tenant_that_fills_the_cache_is_preempted_for_others() -> None:
    clocked = Clocked(pages=40, step_tokens=64, max_running=16)
    for _ in range(24):
        clocked.ask("flood", tokens=30, prompt=20, n=2, priority=-100)
    for _ in range(10):
        clocked.step()
    assert clocked.until(clocked.ask("quiet", prompt=24, tokens=3), 12) <= 10
    clocked.engine.check_integrity()


def test_long_prompts_of_one_tenant_hold_up_no_prompt_of_another() -> None:
    clocked = Clocked(step_tokens=16, max_running=16, max_prefills=2)
    for _ in range(8):
        clocked.ask("flood", prompt=200, priority=-100)
    clocked.step()
    assert clocked.until(clocked.ask("quiet", prompt=12), 12) <= 4


@pytest.mark.parametrize("seed", range(3))
def test_every_tenant_is_served_within_a_bounded_number_of_steps(seed: int) -> None:
    random, began = np.random.default_rng(seed), dict[str, int]()
    clocked = Clocked(pages=120, step_tokens=48, max_running=12, mixed_tokens=24)
    quiet = [f"quiet{i}" for i in range(4)]
    for step in range(700):
        while len(clocked.engine.scheduler.waiting) < 40:  # two never stop
            name = f"flood{random.integers(2)}"
            asked = {"tokens": int(random.integers(5, 40)), "n": int(random.integers(1, 9))}
            clocked.ask(
                name, prompt=int(random.integers(1, 40)), priority=int(random.integers(-100, 101)), **asked
            )
        if step > 50 and random.random() < 0.15:
            name = quiet[int(random.integers(4))]
            busy = any(id.startswith(name) and id not in clocked.finished for id in began)
            if not busy:
                id = clocked.ask(name, prompt=int(random.integers(1, 20)), tokens=int(random.integers(1, 4)))
                began[id] = clocked.steps
        clocked.step()
        if step % 50 == 0:
            clocked.engine.check_integrity()
    ended = {id: clocked.finished.get(id, clocked.steps + 1) - start for id, start in began.items()}
    assert len(ended) > 60
    assert max(ended.values()) <= 25, max(ended.items(), key=lambda item: item[1])
    assert min(clocked.tokens["flood0"], clocked.tokens["flood1"]) > 1000


def test_tenants_with_constant_load_get_equal_shares() -> None:
    clocked = Clocked(step_tokens=64, max_running=12)
    for step in range(600):
        waiting = Counter(s.tenant for s in clocked.engine.scheduler.waiting)
        while waiting["many"] < 30:
            waiting["many"] += 8
            clocked.ask("many", tokens=20, n=8, priority=-100)
        while waiting["one"] < 4:
            waiting["one"] += 1
            clocked.ask("one", tokens=20, priority=100)
        if step == 100:
            clocked.tokens.clear()
        clocked.step()
    assert 0.8 < clocked.tokens["one"] / clocked.tokens["many"] < 1.25


def test_within_a_tenant_the_lowest_priority_is_not_starved() -> None:
    clocked = Clocked(step_tokens=64, max_running=4)
    last = clocked.ask("a", tokens=10, priority=100)
    for step in range(200):
        if len(clocked.engine.scheduler.waiting) < 12:
            clocked.ask("a", tokens=10, priority=-100)
        clocked.step()
        if last in clocked.finished:
            assert step < 60
            return
    pytest.fail("the lowest priority starved")


def test_priority_orders_the_requests_of_one_tenant() -> None:
    clocked = Clocked(step_tokens=64, max_running=1)
    clocked.ask("a", tokens=5)
    clocked.step()
    ids = [clocked.ask("a", tokens=2, priority=priority) for priority in (3, 1, 2)]
    for _ in range(30):
        clocked.step()
    assert sorted(ids, key=clocked.finished.__getitem__) == [ids[1], ids[2], ids[0]]


def test_a_priority_does_not_displace_another_tenant() -> None:
    clocked = Clocked(step_tokens=64, max_running=2)
    slow = [clocked.ask(tenant, tokens=30) for tenant in "ab"]
    clocked.step()
    clocked.ask("a", tokens=5, priority=-100)
    clocked.step()
    preempted = clocked.engine.scheduler.waiting
    assert [s.state.request.id for s in preempted] == [slow[0]]  # its own, not that of b


def test_a_full_queue_still_takes_the_share_of_another_tenant() -> None:
    clocked = Clocked(step_tokens=64, max_running=1, max_queued=10, max_queued_tokens=100)
    clocked.fill("flood")
    asked = [clocked.ask("quiet") for _ in range(4)]
    clocked.fill("quiet")
    with pytest.raises(OverloadedError):
        clocked.ask("flood")
    for _ in range(600):
        clocked.step()
    assert set(asked) <= clocked.finished.keys()


@pytest.mark.parametrize("priority", [-101, 101, -(2**31)])
def test_a_priority_out_of_range_is_refused(priority: int) -> None:
    with pytest.raises(InputError, match="between -100 and 100") as refused:
        Clocked().ask("a", priority=priority)
    assert refused.value.where == "priority"


def _sequence(tenant: str, number: int = 0) -> Sequence:
    return Sequence(
        RequestState(Request(id=str(number), prompt=[1], tenant=tenant), number, float(number), 30.0), 0
    )


def test_an_idle_tenant_earns_no_credit_and_keeps_its_debt() -> None:
    shares, busy, late = FairShares(), _sequence("busy"), _sequence("late")
    shares.on_arrival("busy", [])
    shares.charge(busy, 1000, output=False)
    shares.on_arrival("late", [busy])
    assert shares.served["late"] == 1000
    shares.charge(late, 500, output=False)
    shares.on_arrival("late", [busy])  # it left, and comes again at once
    assert shares.served["late"] == 1500


def test_names_of_tenants_take_bounded_memory() -> None:
    shares, busy = FairShares(), _sequence("busy")
    shares.on_arrival("busy", [])
    shares.charge(busy, 10, output=True)
    for number in range(3 * MAX_TENANTS):
        shares.on_arrival(f"t{number}", [busy])
    assert len(shares.served) <= MAX_TENANTS + 1
    assert shares.served["busy"] == 11


def test_a_full_queue_refuses_only_tenants_beyond_their_share() -> None:
    found = defaultdict(list)
    for own in (1, 5, 6, 10):
        for total in (10, 11, 20, 21):
            found[is_beyond_share(own, total, 2, 10)].append((own, total))
    assert found[False] == [(1, 10), (1, 11), (1, 20), (5, 10), (5, 11), (5, 20), (6, 10), (10, 10)]
