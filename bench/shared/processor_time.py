"""Processor time of a process with its children, and of everything else on the machine."""

from __future__ import annotations

import time

import psutil


def cpu_seconds(pid: int) -> float:
    """Return the seconds that a process and its living children have spent; 0 for process 0."""
    if not pid:
        return 0.0
    process = psutil.Process(pid)
    return sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))


class OtherProcesses:
    """Cores taken by processes other than this one and its children, since `begin`."""

    def __init__(self) -> None:
        self._pid = psutil.Process().pid
        self.begin()

    def begin(self) -> None:
        self._when, self._all, self._own = time.monotonic(), self._busy(), cpu_seconds(self._pid)

    def cores(self) -> float:
        """Return the cores taken; the resolution is 0.01 s for each of our processes."""
        seconds = time.monotonic() - self._when
        return (self._busy() - self._all - (cpu_seconds(self._pid) - self._own)) / seconds

    def _busy(self) -> float:
        times = psutil.cpu_times()
        kinds = ("user", "nice", "system", "irq", "softirq", "steal")
        return sum(getattr(times, kind, 0.0) for kind in kinds)
