"""Timing calls of milliseconds to many seconds in turns, on a machine that others use too.

Turns in which other processes took more than `FOREIGN` of the processors are dropped as long as others are left.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from kernels_timing import PAUSE, Side

TURN = 0.1  # seconds of timed calls in one turn, at least one call
MOST = 15  # quiet rounds
LONG = 0.5  # seconds; shorter calls get one that is not counted at the start of each turn
FOREIGN = 0.05  # of the processor time of a turn
TICKS = os.sysconf("SC_CLK_TCK")


class Timed(NamedTuple):
    seconds: dict[str, float]  # the median of a call of each side
    quiet: dict[str, int]  # turns of each side that nobody disturbed
    rounds: int


def interleaved(sides: Sequence[Side], seconds: float) -> Timed:
    """Rounds in which every side has a turn, in rotating order, until `seconds` are over."""
    took: dict[str, list[tuple[bool, float]]] = {side.name: [] for side in sides}
    begin, rounds = time.perf_counter(), 0
    gc.collect()
    gc.disable()
    try:
        while min(_quiet(turns) for turns in took.values()) < MOST:
            for index in range(len(sides)):
                side = sides[(index + rounds) % len(sides)]
                time.sleep(PAUSE)
                quiet, value = _turn(side.run)
                took[side.name].append((quiet, value / side.copies))
            rounds += 1
            spent = time.perf_counter() - begin
            if spent + spent / rounds > seconds:
                break
    finally:
        gc.enable()
    medians = {name: statistics.median(_kept(turns)) for name, turns in took.items()}
    return Timed(medians, {name: _quiet(turns) for name, turns in took.items()}, rounds)


def _quiet(turns: list[tuple[bool, float]]) -> int:
    return sum(quiet for quiet, _ in turns)


def _kept(turns: list[tuple[bool, float]]) -> list[float]:
    return [value for quiet, value in turns if quiet] or [value for _, value in turns]


def _turn(run: Callable[[], object]) -> tuple[bool, float]:
    """Whether nobody disturbed, and the median of the calls."""
    before = _foreign(), time.perf_counter()
    times = [_seconds(run)]
    if times[0] <= LONG:
        times, until = [_seconds(run)], time.perf_counter() + TURN
        while time.perf_counter() < until:
            times.append(_seconds(run))
    elapsed = time.perf_counter() - before[1]
    allowed = max(FOREIGN * elapsed * (os.cpu_count() or 1), 2 / TICKS)  # two ticks are within its resolution
    return _foreign() - before[0] <= allowed, statistics.median(times)


def _foreign() -> float:
    """Seconds of processor time that others have used since the machine started."""
    user, nice, system = (int(ticks) for ticks in Path("/proc/stat").read_text().split(maxsplit=4)[1:4])
    own = os.times()
    return (user + nice + system) / TICKS - own.user - own.system


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
