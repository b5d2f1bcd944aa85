"""Timing several engines on one machine: in turns, each after a pause in which the other's threads go to sleep."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PAUSE = 0.03  # seconds; libgomp and ONNX Runtime spin for up to 20 ms after their last call
WARM = 0.004  # seconds of calls before the clock starts: threads awake, code and tables in the caches
TURN = 0.02  # seconds of timed calls in one turn
ROUNDS = 9
READ_BYTES = 256 << 20


@dataclass(frozen=True)
class Side:
    """One engine with its weights. `run` multiplies once by each of `copies` equal weights at different addresses."""

    name: str
    run: Callable[[], object]
    output: Callable[[], Tensor]  # the product with the first copy, float32 [M, N]
    copies: int = 1


def interleaved(sides: Sequence[Side], rounds: int = ROUNDS) -> dict[str, float]:
    """Median seconds of one product of each side, over `rounds` turns whose order rotates."""
    return {name: statistics.median(values) for name, values in turns(sides, rounds).items()}


def turns(sides: Sequence[Side], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Seconds of one product of each side in each of `rounds` turns, whose order rotates."""
    medians: dict[str, list[float]] = {side.name: [] for side in sides}
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            for index in range(len(sides)):
                side = sides[(index + turn) % len(sides)]
                time.sleep(PAUSE)
                medians[side.name].append(_turn(side.run) / side.copies)
    finally:
        gc.enable()
    return medians


def _turn(run: Callable[[], object]) -> float:
    """The median of the calls that fit into one turn; of a call that is longer than a turn, one."""
    until = time.perf_counter() + WARM
    run()
    while time.perf_counter() < until:
        run()
    times: list[float] = []
    until = time.perf_counter() + TURN
    while not times or time.perf_counter() < until:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def reader() -> Side:
    """Reading `READ_BYTES` of memory with all of torch's threads, as a side: it takes its turns with the kernels.

    The faster here of a sum and a matrix-vector product over float32; the latter is MKL's, which is slow on AMD.
    """
    block, ones = torch.ones(READ_BYTES >> 12, 1 << 10), torch.ones(1 << 10)
    ways: tuple[Callable[[], Tensor], ...] = (block.sum, lambda: torch.mv(block, ones))
    run = min(ways, key=_turn)
    return Side("reading memory", run, run)
