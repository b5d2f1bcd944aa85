"""Timing and judgement are apart: clocks are made up here, nothing is timed."""

from __future__ import annotations

import gc
import hashlib
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from infer import latency
from infer.device import processors


class Fake:
    """A clock that moves only when a call says how long it took."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []

    def clock(self) -> float:
        return self.now

    def call(self, name: str, seconds: Callable[[], float]) -> latency.Call:
        def work() -> None:
            self.order.append(name)
            self.now += seconds()

        return work


def noisy(center: float, sigma: float, seed: int) -> Callable[[], float]:
    random = np.random.default_rng(seed)
    return lambda: center * float(np.exp(random.normal(0, sigma)))


def test_summary_gives_percentiles_mean_and_spread() -> None:
    taken = latency.summarize([float(i) for i in range(1, 102)], warmup=3)
    assert (taken.p50, taken.p90, taken.p99, taken.min, taken.n, taken.warmup) == (51, 91, 100, 1, 101, 3)
    assert taken.mean == 51
    assert taken.spread == pytest.approx(80 / 51)


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.80, 0.96, "faster"),
        (0.80, 0.97, "within noise"),
        (0.97, 1.03, "same"),
        (0.99, 1.02, "same"),
        (0.96, 1.02, "within noise"),
        (0.99, 1.04, "within noise"),
        (1.04, 1.50, "slower"),
        (0.5, 2.0, "within noise"),
    ],
)
def test_the_verdict_follows_the_whole_confidence_interval(low: float, high: float, said: str) -> None:
    assert latency.verdict(low, high) == said


def test_decision_is_seeded_and_brackets_the_median() -> None:
    ratios = np.random.default_rng(1).lognormal(np.log(0.5), 0.05, 40)
    first, second = latency.decide(ratios, seed=3), latency.decide(ratios, seed=3)
    assert first == second
    median, low, high, said = first
    assert low <= median <= high
    assert said == "faster"


def test_one_outlier_does_not_change_the_decision() -> None:
    assert latency.decide([0.5] * 20 + [50.0])[3] == "faster"


def test_pairs_are_interleaved_and_the_order_alternates() -> None:
    fake = Fake()
    a, b = fake.call("a", lambda: 0.02), fake.call("b", lambda: 0.02)
    result = latency.paired(a, b, clock=fake.clock, min_pairs=4)
    assert "".join(fake.order[-8:]) == "abbaabba"
    assert result.verdict == "same"
    assert result.ratio == pytest.approx(1.0)
    assert (result.a.n, result.b.n) == (4, 4)


def test_a_clear_difference_stops_early_and_says_how_much() -> None:
    fake = Fake()
    a, b = fake.call("a", noisy(0.010, 0.02, 1)), fake.call("b", noisy(0.021, 0.02, 2))
    result = latency.paired(a, b, clock=fake.clock)
    assert result.verdict == "faster"
    assert result.pairs == 11
    assert result.speedup == pytest.approx(2.1, rel=0.03)
    assert latency.paired(b, a, clock=fake.clock).verdict == "slower"


@pytest.mark.parametrize(("seconds", "pairs"), [(0.45, 5), (0.12, 8), (0.01, 11)])
def test_large_differences_of_slow_calls_stop_early(seconds: float, pairs: int) -> None:
    fake = Fake()
    a, b = fake.call("a", lambda: 0.1 * seconds), fake.call("b", lambda: seconds)
    assert latency.paired(a, b, clock=fake.clock).pairs == pairs


def test_similar_slow_calls_need_all_pairs() -> None:
    fake, odd = Fake(), [0.5] * 20
    odd[4] = 0.9  # after the warm-up
    falling = iter(odd)
    a, b = fake.call("a", lambda: next(falling)), fake.call("b", lambda: 1.0)
    assert latency.paired(a, b, clock=fake.clock).pairs == 11


def test_measurement_of_persistent_noise_ends_with_the_budget() -> None:
    fake = Fake()
    a, b = fake.call("a", noisy(0.2, 1.0, 3)), fake.call("b", noisy(0.2, 1.0, 4))
    result = latency.paired(a, b, clock=fake.clock, max_seconds=5.0)
    assert result.verdict == "within noise"
    assert fake.now < 20


def test_slow_calls_still_get_the_least_number_of_pairs() -> None:
    fake = Fake()
    result = latency.paired(
        fake.call("a", lambda: 9.0), fake.call("b", lambda: 9.0), clock=fake.clock, min_pairs=3
    )
    assert result.pairs == 3


def test_short_calls_are_repeated_within_a_turn_and_the_first_is_left_out() -> None:
    fake, short = Fake(), list[float]()

    def took() -> float:
        began = not fake.order[:-1] or fake.order[-2] != "a"
        short.append(0.5 if began and short else 5.05e-4)  # slow whenever the other side ran before
        return short[-1]

    a, b = fake.call("a", took), fake.call("b", lambda: 0.05)
    result = latency.paired(a, b, clock=fake.clock, min_pairs=5)
    assert result.a.n == 5 * 20
    assert result.b.n == 5
    assert result.ratio == pytest.approx(0.0101)


def test_every_turn_waits_for_the_threads_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake()
    a, b = fake.call("a", lambda: 0.02), fake.call("b", lambda: 0.02)
    monkeypatch.setattr(processors, "wait_for_sleep", lambda: fake.order.append("."))
    latency.paired(a, b, clock=fake.clock, min_pairs=4)
    assert "".join(fake.order[-16:]) == ".a.b.b.a.a.b.b.a"
    latency.in_turns([a, b], clock=fake.clock)
    assert "".join(fake.order[-8:]) in (".a.b.b.a", ".b.a.a.b")


def test_briefly_timed_calls_count_by_their_shortest_where_noise_is_large() -> None:
    assert latency.summarize([1.0, 1.0, 1.0, 1.4, 1.5, 1.5, 1.6]).own == 1.0
    assert latency.summarize([1.0, 1.1, 1.2, 1.2, 1.2, 1.2, 9.0]).own == 1.2


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system does not say what threads do")
def test_a_thread_that_runs_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    over, running = threading.Event(), processors._others_running
    data = bytes(1 << 24)

    def spin() -> None:  # hashing gives the interpreter's lock away
        while not over.is_set():
            hashlib.sha256(data)

    spinner, looks = threading.Thread(target=spin), list[bool]()

    def look() -> bool:
        looks.append(running())
        if looks.count(True) == 3:
            over.set()
        return looks[-1] or not over.is_set()

    monkeypatch.setattr(processors, "_others_running", look)
    monkeypatch.setattr(processors, "MOST_SECONDS", 60.0)
    spinner.start()
    latency.settle("cpu")
    spinner.join()
    assert looks[-1] is False
    assert looks.count(True) >= 3


def test_a_thread_that_never_sleeps_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = list[int]()
    monkeypatch.setattr(processors, "_others_running", lambda: not looks.append(1))
    monkeypatch.setattr(processors, "MOST_SECONDS", 0.01)
    latency.settle("cpu")
    assert looks


def test_measure_reaches_both_minima_and_counts_warm_up_apart() -> None:
    fake = Fake()
    taken = latency.measure(fake.call("a", lambda: 0.1), clock=fake.clock, min_seconds=2.05, min_runs=3)
    assert taken.n == 21
    assert len(fake.order) == taken.n + taken.warmup


def test_measure_stops_at_the_maximum_number_of_runs() -> None:
    fake = Fake()
    assert latency.measure(fake.call("a", lambda: 0.0), clock=fake.clock, max_runs=50).n == 50


def test_warm_up_goes_on_while_calls_get_faster_and_gives_up_after_ten() -> None:
    fake = Fake()
    falling = iter([8e-3, 4e-3, 2e-3, 1e-3, 1e-3, 1e-3])
    assert latency.warm_up(fake.call("a", lambda: next(falling)), clock=fake.clock) == 6
    halving = iter([2.0 ** -(i + 7) for i in range(20)])
    assert latency.warm_up(fake.call("a", lambda: next(halving)), clock=fake.clock) == 10


def test_garbage_collection_is_paused_and_restored_after_errors() -> None:
    fake, seen = Fake(), list[bool]()

    def took() -> float:
        seen.append(gc.isenabled())
        if len(seen) > 5:
            raise ValueError("enough")
        return 0.01

    with pytest.raises(ValueError, match="enough"):
        latency.measure(fake.call("a", took), clock=fake.clock)
    assert seen == [True, True, True, False, False, False]
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("pairs", "seconds", "far", "decided", "ends"),
    [
        (4, 9.0, True, True, False),
        (5, 1.0, True, False, True),
        (5, 0.9, True, False, False),
        (5, 9.0, False, True, False),
        (11, 0.1, False, True, True),
        (11, 3.9, False, False, False),
        (11, 4.0, False, False, True),
        (20, 0.1, False, False, True),
    ],
)
def test_pairs_end_when_decided_when_far_apart_or_when_time_is_spent(
    pairs: int, seconds: float, far: bool, decided: bool, ends: bool
) -> None:
    limits = latency.PairLimits(min_pairs=11, max_pairs=20, max_seconds=4.0)
    assert limits.end(pairs, seconds, far=far, decided=decided) is ends


def test_the_interval_of_five_ratios_is_that_from_the_least_to_the_largest() -> None:
    ratios = [0.61, 0.79, 0.7, 0.5, 0.81]
    assert latency.decide(ratios)[1:3] == (0.5, 0.81)


@pytest.mark.parametrize(
    ("seconds", "count"),
    [([0.05, 0.05], 2), ([0.2, 0.1, 0.1], 3), ([0.6, 0.4], 2), ([30.0, 2.0], 2), ([0.049, 0.049, 0.049], 3)],
    ids=["steady", "the first was slow", "a second was spent", "longer than a second", "short"],
)
def test_slow_calls_are_warmed_up_fewer_times(seconds: list[float], count: int) -> None:
    fake, left = Fake(), iter(seconds)
    assert latency.warm_up(fake.call("a", lambda: next(left)), clock=fake.clock) == count


def test_the_last_warm_up_call_sets_the_repeats() -> None:
    fake = Fake()
    a, b = fake.call("a", lambda: 0.2), fake.call("b", lambda: 1.0)
    result = latency.paired(a, b, clock=fake.clock)
    assert len(fake.order) == 2 * result.pairs + result.a.warmup + result.b.warmup
