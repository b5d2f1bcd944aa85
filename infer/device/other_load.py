"""Processor time that other processes take while something is timed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

MOST_MISSING = 0.3  # processors that others took from a timing, above which it was disturbed
LOOK = 0.2  # seconds between two looks at what others take
TICKS = 0.02  # seconds by which the system's counts, in ticks, may be off
# Fields of /proc/stat; `user` has the time of guests too.
BUSY = ("user", "nice", "system", "irq", "softirq", "steal")


class OtherLoad:
    """Processors that other processes use, from construction on."""

    def __init__(self) -> None:
        self._processors = _allowed()
        self._began, self._own, self._busy = time.perf_counter(), time.process_time(), self._busy_seconds()

    def excess(self, threads: int) -> float:
        """Return how many processors are missing, on average, for a team of so many threads: to others, or because
        this process was not run at all.
        """
        taken, run = self._since(threads)
        return max(taken, 1 - run)

    def taken(self, threads: int) -> float:
        """Return how many processors others use, on average, that a team of so many threads would need."""
        return self._since(threads)[0]

    def _since(self, threads: int) -> tuple[float, float]:
        """Return the processors that others use of those of a team, and those that this process used."""
        seconds = max(time.perf_counter() - self._began, 1e-9)
        own = time.process_time() - self._own
        others = max(0.0, self._busy_seconds() - self._busy - own - TICKS) / seconds
        return max(0.0, others - max(0, len(self._processors) - threads)), own / seconds

    def _busy_seconds(self) -> float:
        times = psutil.cpu_times(percpu=True)
        known = [times[i] for i in self._processors if i < len(times)]
        return sum(getattr(one, name, 0.0) for one in known for name in BUSY)


def wait_until_quiet(threads: int, seconds: float) -> float:
    """Wait, at most so long, until others leave a team of so many threads its processors; return the seconds waited."""
    began = time.perf_counter()
    while (waited := time.perf_counter() - began) < seconds:
        load = OtherLoad()
        time.sleep(min(LOOK, seconds - waited))
        if load.taken(threads) <= MOST_MISSING:
            break
    return time.perf_counter() - began


def _allowed() -> list[int]:
    """Return the processors that this process may use; all of them where the system does not say."""
    process = psutil.Process()
    if hasattr(process, "cpu_affinity"):
        return list(process.cpu_affinity() or ())
    return list(range(psutil.cpu_count() or 1))


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread of torch's within the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
