"""Timing of several engines on one machine, in turns, each after a pause in which the others' threads go to sleep.

`interleaved` is for calls of at most some milliseconds. `interleaved_for` is for calls of milliseconds to many seconds
on a machine that others use too: turns in which other processes took more than `FOREIGN` of the processors are dropped
as long as others are left.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bench.shared.child_process import Seconds
from infer import latency

PAUSE = 0.06  # seconds in which threads of other processes fall asleep; ONNX Runtime's spin for 50 ms
WARM = 0.004  # seconds of calls before the clock starts: threads awake, code and tables in the caches
TURN = 0.02  # seconds of timed calls in one turn
ROUNDS = 9
READ_BYTES = 256 << 20

FEWEST = (
    5  # rounds: of one round, 512 tokens through the 1B shape gave 1.84 times a rival's speed, of six 1.56
)
LONG_TURN = 0.1  # seconds of timed calls in one turn of `interleaved_for`, at least one call
MOST = 15  # undisturbed rounds
LONG = 0.5  # seconds; shorter calls get one that is not counted at the start of each turn
FOREIGN = 0.05  # of the processor time of a turn
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Side:
    """One engine with its weights. `run` multiplies once by each of `copies` equal weights at different addresses."""

    name: str
    run: Callable[[], object]  # returns `Seconds`, or is timed here
    output: Callable[[], Tensor]  # the product with the first copy, float32 [M, N]
    copies: int = 1
    pid: int | None = None  # of the process that computes, where it is not this one
    turn: Callable[[], float] | None = None  # the median of a turn, where another process times it


class Timed(NamedTuple):
    """Result of `interleaved_for`."""

    seconds: dict[str, float]  # the median of a call of each side
    quiet: dict[str, int]  # undisturbed turns of each side
    rounds: int


def interleaved(sides: Sequence[Side], rounds: int = ROUNDS) -> dict[str, float]:
    """Return the median seconds of one product of each side, over `rounds` turns whose order rotates."""
    return medians(turns(sides, rounds))


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of the turns of each side."""
    return {name: statistics.median(values) for name, values in times.items()}


def turns(sides: Sequence[Side], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Return the seconds of one call of each implementation in each of `rounds` rounds, in rotating order."""
    took: dict[str, list[float]] = {side.name: [] for side in sides}
    with latency.no_collection():
        for number in range(rounds):
            for side in _in_turn(sides, number):
                took[side.name].append((side.turn() if side.turn else _turn(side.run)) / side.copies)
    return took


def turn(side: Side) -> float:
    """Return the median seconds of the calls of one turn of a side of this process, all its copies together."""
    with latency.no_collection():
        return _turn(side.run)


def interleaved_for(sides: Sequence[Side], seconds: float) -> Timed:
    """Time rounds in which every side has a turn, in rotating order, until `seconds` are over, at least `FEWEST`."""
    took: dict[str, list[tuple[bool, float]]] = {side.name: [] for side in sides}
    begin, rounds = time.perf_counter(), 0
    with latency.no_collection():
        while min(_num_quiet(turns) for turns in took.values()) < MOST:
            for side in _in_turn(sides, rounds):
                quiet, value = _long_turn(side.run, side.pid)
                took[side.name].append((quiet, value / side.copies))
            rounds += 1
            spent = time.perf_counter() - begin
            if rounds >= FEWEST and spent + spent / rounds > seconds:
                break
    kept = {name: _kept(turns) for name, turns in took.items()}
    return Timed(medians(kept), {name: _num_quiet(turns) for name, turns in took.items()}, rounds)


def _in_turn(sides: Sequence[Side], number: int) -> Iterator[Side]:
    """Yield every side, the first one rotating with the number of the round, each after a pause."""
    for index in range(len(sides)):
        if any(side.pid or side.turn for side in sides):
            time.sleep(PAUSE)
        latency.settle("cpu")
        yield sides[(index + number) % len(sides)]


def _turn(run: Callable[[], object]) -> float:
    """Return the median of the calls that fit into one turn; of a call that is longer than a turn, one."""
    until = time.perf_counter() + WARM
    run()
    while time.perf_counter() < until:
        run()
    times: list[float] = []
    until = time.perf_counter() + TURN
    while not times or time.perf_counter() < until:
        times.append(_seconds(run))
    return statistics.median(times)


def _long_turn(run: Callable[[], object], pid: int | None = None) -> tuple[bool, float]:
    """Return True if no other process than this and `pid` disturbed the turn, and the median of its calls."""
    before = _foreign(pid), time.perf_counter()
    times = [_seconds(run)]
    if times[0] <= LONG:
        times, until = [_seconds(run)], time.perf_counter() + LONG_TURN
        while time.perf_counter() < until:
            times.append(_seconds(run))
    elapsed = time.perf_counter() - before[1]
    allowed = max(FOREIGN * elapsed * (os.cpu_count() or 1), 2 / TICKS)  # two ticks are within its resolution
    return _foreign(pid) - before[0] <= allowed, statistics.median(times)


def _num_quiet(turns: list[tuple[bool, float]]) -> int:
    return sum(quiet for quiet, _ in turns)


def _kept(turns: list[tuple[bool, float]]) -> list[float]:
    return [value for quiet, value in turns if quiet] or [value for _, value in turns]


def _foreign(pid: int | None) -> float:
    """Return the seconds of processor time that processes but this and `pid` used since the machine started."""
    user, nice, system = (int(ticks) for ticks in Path("/proc/stat").read_text().split(maxsplit=4)[1:4])
    own = os.times()
    return (user + nice + system) / TICKS - own.user - own.system - _used_by(pid)


def _used_by(pid: int | None) -> float:
    """Return the seconds of processor time of another process; 0 for None and for one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    took = run()
    return float(took) if isinstance(took, Seconds) else time.perf_counter() - start


def reader() -> Side:
    """Return the read of `READ_BYTES` of memory by all of torch's threads, as a side that takes its turns.

    The faster here of a sum and a matrix-vector product over float32; the latter is MKL's, which is slow on AMD.
    """
    block, ones = torch.ones(READ_BYTES >> 12, 1 << 10), torch.ones(1 << 10)
    ways: tuple[Callable[[], Tensor], ...] = (block.sum, lambda: torch.mv(block, ones))
    run = min(ways, key=_turn)
    return Side("reading memory", run, run)
