"""Processor time that other processes take while something is timed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

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
        seconds = max(time.perf_counter() - self._began, 1e-9)
        own = time.process_time() - self._own
        others = max(0.0, self._busy_seconds() - self._busy - own - TICKS) / seconds
        spare = max(0, len(self._processors) - threads)
        return max(0.0, others - spare, 1 - own / seconds)

    def _busy_seconds(self) -> float:
        times = psutil.cpu_times(percpu=True)
        known = [times[i] for i in self._processors if i < len(times)]
        return sum(getattr(one, name, 0.0) for one in known for name in BUSY)


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
