"""Latency measurement of single calls, and paired comparison of two: medians, interval, verdict.

Machines are shared and noisy, so two things are never timed one after the other and their means divided. They take
turns, and each turn begins when the threads of the turn before sleep. Timing and judgement are apart: `summarize` and
`decide` are pure.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from . import device as hardware
from .device import processors

NOISE = "within noise"  # verdict on a pair that tells nothing
FASTER, SLOWER = 0.97, 1.03  # a ratio between them is no difference that a user could notice
EARLY_PAIRS, LONG = 5, 1.0  # pairs, and seconds, after which a ratio is believed that was
MIN_PAIRS = 11  # of a verdict on short calls
LEAST_PAIRS, OVERTIME = 3, 4.0  # pairs of long calls, once they took so many times the seconds allowed
DISTURBED = 2.0  # times the shortest call: a median above it is time that other processes took
UNSTEADY = 1.3  # times the shortest of briefly timed calls: above it the median is mostly noise
FAR = 0.8  # beyond this, or its inverse, in each of them
FEWEST_TURNS = 2  # of calls longer than `LONG`
SLOW_CALL = 0.05  # seconds; warm-up calls of this length are fewer
MOST_WARM_UPS = 10
WIDE = 2.0  # times the lower end of an interval
TURN = 0.01  # seconds; calls shorter than this are repeated within a turn, after one that is not counted
MOST_REPEATS = 1000
Call = Callable[[], object]
Clock = Callable[[], float]


class Latency(msgspec.Struct, frozen=True):
    """Seconds a call, over `n` timed calls; `spread` is (p90 - p10) / p50, `warmup` calls are not counted."""

    p50: float
    p90: float
    p99: float
    mean: float
    min: float
    n: int
    spread: float
    warmup: int = 0

    @property
    def disturbed(self) -> bool:
        """Return whether the median is no time of the call's own, but of what other processes took."""
        return self.p50 > DISTURBED * self.min

    @property
    def own(self) -> float:
        """The median, or the shortest call where the median is far above it.

        Disturbances only lengthen a call, so that the minimum bears them best (Chen and Revels 2016, "Robust
        benchmarking in noisy environments").
        """
        return self.min if self.p50 > UNSTEADY * self.min else self.p50


class Paired(msgspec.Struct, frozen=True):
    """Time of a over time of b: the median over pairs, its 95 % interval, and the verdict on a.

    `verdict`: "faster" when the whole interval lies below 0.97, "slower" above 1.03, "same" between them, and
    "within noise" when the interval could not be narrowed enough in the time allowed.
    """

    ratio: float
    low: float
    high: float
    verdict: str
    pairs: int
    a: Latency
    b: Latency

    @property
    def is_wide(self) -> bool:
        """Return whether the interval is so wide that the ratio says little."""
        return self.high > WIDE * self.low

    def undisturbed(self) -> Paired:
        """Return what the shortest calls say: their ratio, and a verdict only where the pairs say the same."""
        ratio = self.a.min / max(self.b.min, 1e-9)
        low, high = min(self.low, ratio), max(self.high, ratio)
        return msgspec.structs.replace(self, ratio=ratio, low=low, high=high, verdict=verdict(low, high))

    @property
    def speedup(self) -> float:
        """Speed-up of a over b, the inverse of `ratio`."""
        return 1 / self.ratio


class PairLimits(NamedTuple):
    """Least and largest number of pairs, and the seconds that undecided ones may take."""

    min_pairs: int
    max_pairs: int
    max_seconds: float

    def end(self, pairs: int, seconds: float, *, far: bool, decided: bool) -> bool:
        """Return whether no more pairs are needed after so many, in so many seconds.

        `far`: all of their ratios lie so far from 1 on one side that more pairs can't change the verdict.
        """
        if pairs >= self.max_pairs or (far and pairs >= EARLY_PAIRS and seconds >= LONG):
            return True
        if pairs >= LEAST_PAIRS and seconds >= OVERTIME * self.max_seconds:
            return True
        return pairs >= self.min_pairs and (decided or seconds >= self.max_seconds)


def summarize(seconds: Sequence[float], warmup: int = 0) -> Latency:
    """Percentiles (linear between neighbours) of at least one timed call."""
    times = np.asarray(seconds, dtype=np.float64)
    p10, p50, p90, p99 = (float(v) for v in np.percentile(times, (10, 50, 90, 99)))
    spread = (p90 - p10) / p50 if p50 > 0 else 0.0
    return Latency(p50, p90, p99, float(times.mean()), float(times.min()), len(times), spread, warmup)


def decide(
    ratios: Sequence[float], *, seed: int = 0, resamples: int = 1000
) -> tuple[float, float, float, str]:
    """Median of the ratios, the bootstrap 95 % interval of that median, and the verdict (see `Paired`)."""
    values = np.asarray(ratios, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(values), size=(resamples, len(values)))
    low, high = (float(v) for v in np.percentile(np.median(values[picks], axis=1), (2.5, 97.5)))
    return float(np.median(values)), low, high, verdict(low, high)


def verdict(low: float, high: float) -> str:
    if high < FASTER:
        return "faster"
    if low > SLOWER:
        return "slower"
    return "same" if low >= FASTER and high <= SLOWER else NOISE


def measure(
    call: Call,
    *,
    device: str = "cpu",
    min_seconds: float = 0.5,
    min_runs: int = 10,
    max_runs: int = 2000,
    clock: Clock = time.perf_counter,
) -> Latency:
    """Time single calls until both minima are reached, or `max_runs`; waits for the device at each end."""
    warmup = warm_up(call, device, clock)
    times: list[float] = []
    with no_collection():
        while len(times) < max_runs and (len(times) < min_runs or math.fsum(times) < min_seconds):
            if times and math.fsum(times) >= max(LONG, min_seconds):
                break
            times.append(timed(call, device, clock))
    return summarize(times, warmup)


def in_turns(
    calls: Sequence[Call],
    *,
    device: str = "cpu",
    min_seconds: float = 0.1,
    min_runs: int = 5,
    max_runs: int = 300,
    clock: Clock = time.perf_counter,
) -> list[Latency]:
    """Time several calls interleaved, so that a slowdown of the machine affects all of them.

    Stops when all together took `min_seconds` for each and each had `min_runs` turns, or at `max_runs`.
    """
    warmups, last = zip(*(_warmed(call, device, clock) for call in calls), strict=True)
    repeats = [num_repeats(seconds) for seconds in last]
    times: list[list[float]] = [[] for _ in calls]
    spent, count = 0.0, 0
    with no_collection():
        while count < max_runs and (count < min_runs or spent < min_seconds * len(calls)):
            if count >= FEWEST_TURNS and spent >= max(LONG, min_seconds) * len(calls):
                break
            for offset in range(len(calls)):
                index = (count + offset) % len(calls)
                taken = turn(calls[index], repeats[index], device, clock)
                times[index] += taken
                spent += math.fsum(taken)
            count += 1
    return [summarize(taken, warmup) for taken, warmup in zip(times, warmups, strict=True)]


def paired(
    a: Call,
    b: Call,
    *,
    device: str = "cpu",
    min_pairs: int = MIN_PAIRS,
    max_pairs: int = 400,
    max_seconds: float = 4.0,
    seed: int = 0,
    clock: Clock = time.perf_counter,
) -> Paired:
    """Time a and b in turns (a b, b a, a b, …) and stop as soon as the verdict is clear.

    Five pairs are enough where they took a second and one side won each by far, else at least `min_pairs` are made;
    undecided pairs go on until `max_seconds` or `max_pairs`.
    """
    warmups, last = zip(*(_warmed(call, device, clock) for call in (a, b)), strict=True)
    repeats = [num_repeats(seconds) for seconds in last]
    times: tuple[list[float], list[float]] = ([], [])
    ratios: list[float] = []
    limits, start, look = PairLimits(min_pairs, max_pairs, max_seconds), clock(), min_pairs
    with no_collection():
        while True:
            medians = [0.0, 0.0]
            for side in (0, 1) if len(ratios) % 2 == 0 else (1, 0):
                taken = turn((a, b)[side], repeats[side], device, clock)
                times[side].extend(taken)
                medians[side] = float(np.median(taken))
            ratios.append(max(medians[0], 1e-9) / max(medians[1], 1e-9))
            seconds, looks = clock() - start, len(ratios) >= look
            decided = looks and decide(ratios, seed=seed)[3] != NOISE
            far = max(ratios) < FAR or min(ratios) > 1 / FAR
            if limits.end(len(ratios), seconds, far=far, decided=decided):
                break
            if looks:
                look = math.ceil(look * 1.4)
    sides = (summarize(t, w) for t, w in zip(times, warmups, strict=True))
    return Paired(*decide(ratios, seed=seed), len(ratios), *sides)


def is_enough(
    pair: Paired, *, min_pairs: int = MIN_PAIRS, max_pairs: int = 400, max_seconds: float = 4.0
) -> bool:
    """Return whether `paired` with these limits would have stopped at the pairs that were taken with lower ones.

    Of those pairs the interval is known, not each ratio: with five pairs it is that from the least to the largest one.
    """
    seconds = pair.a.mean * pair.a.n + pair.b.mean * pair.b.n
    far = pair.high < FAR or pair.low > 1 / FAR
    limits = PairLimits(min_pairs, max_pairs, max_seconds)
    return limits.end(pair.pairs, seconds, far=far, decided=pair.verdict != NOISE)


def warm_up(call: Call, device: str = "cpu", clock: Clock = time.perf_counter) -> int:
    """Call until the time of a call is steady; return how often."""
    return _warmed(call, device, clock)[0]


def _warmed(call: Call, device: str, clock: Clock) -> tuple[int, float]:
    """Call until two calls in a row are within 20 % of the best before, at most ten times; return how often,
    and the seconds of the last one.

    One such call is enough of calls longer than `SLOW_CALL`, and after `LONG` seconds no more are made.
    """
    best, steady, spent = math.inf, 0, 0.0
    settle(device)
    for count in range(1, MOST_WARM_UPS + 1):
        took = timed(call, device, clock)
        steady = steady + 1 if best / 1.2 <= took <= 1.2 * best else 0
        best, spent = min(best, took), spent + took
        if steady >= (1 if took >= SLOW_CALL else 2) or (count >= 2 and spent >= LONG):
            break
    return count, took


def num_repeats(seconds: float) -> int:
    """Return how many calls of so many seconds make a turn."""
    return min(MOST_REPEATS, max(1, math.ceil(TURN / max(seconds, 1e-7))))


def turn(call: Call, repeats: int, device: str, clock: Clock) -> list[float]:
    """Return the seconds of so many calls, once the threads of what was called before sleep.

    The first of several calls wakes the threads and fills the caches: it is not counted.
    """
    settle(device)
    if repeats > 1:
        call()
    return [timed(call, device, clock) for _ in range(repeats)]


def settle(device: str) -> None:
    """Wait for whatever was called before: the device's work, on the CPU threads that spin after a call."""
    hardware.sync(device)
    if device == "cpu":
        processors.wait_for_sleep()


def timed(call: Call, device: str, clock: Clock) -> float:
    """Return the seconds of one call, the device's work included."""
    hardware.sync(device)
    start = clock()
    call()
    hardware.sync(device)
    return clock() - start


@contextmanager
def no_collection() -> Iterator[None]:
    """Run the garbage collector before the timed calls and disable it during them.

    A collection of all objects takes a quarter of a second with torch and transformers imported, longer than the timed
    calls of a small layer.
    """
    enabled = gc.isenabled()
    gc.collect(1)
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass
class Timing:
    """One batch size: ours against the fastest float form, in one interleaved run."""

    batch: int
    pair: Paired
    rival: str = ""  # name of that form
    lengths: tuple[int, int] | None = None  # of the shortest and longest row, in tokens; None without a mask
    missing: float = 0.0  # processors that other processes took all the same, of those that were waited for


class Workload(msgspec.Struct, frozen=True):
    """The use that a language model is timed for, at each batch size of the plan: that many prompts of `prompt` tokens,
    read `chunk` tokens in a step, each answered by `answer` tokens. Dispatch sums a layer's time over it, the speed
    gate the model's.
    """

    prompt: int = 256
    answer: int = 128
    chunk: int = 256

    def steps(self, batch: int) -> dict[int, int]:
        """Count the workload's steps by their number of tokens."""
        whole, rest = divmod(batch * self.prompt, self.chunk)
        steps = {batch: self.answer}
        for tokens, count in ((self.chunk, whole), (rest, 1)):
            if tokens and count:
                steps[tokens] = steps.get(tokens, 0) + count
        return steps

    def logits(self, batch: int) -> dict[int, int]:
        """Count the workload's steps by the number of tokens whose logits they compute (of a prompt its last)."""
        return {batch: self.answer + 1}

    def __str__(self) -> str:
        return f"a prompt of {self.prompt} tokens and an answer of {self.answer}"


WORKLOAD = Workload()
