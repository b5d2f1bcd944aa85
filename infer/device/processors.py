"""Processors of this process: its quota of them, and who else takes them while something is timed.

Neither the kernel's CPU list nor torch takes the quota of a container (cgroup) into account. Others are other
processes, and threads of this one that still wait in a loop for work after a call has returned: OpenMP's spin for 7 ms
after their last call, those of ONNX Runtime for 50 (Zen 3, two cores). Whatever else is called meanwhile shares its
processors with them: two equal sessions of ONNX Runtime, timed in turns, took 6.3 ms a call where each alone takes 2.4,
and one was "faster" by 1.2.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from ..spec import Finding

MOST_MISSING = 0.3  # processors that others took from a timing, above which it was disturbed
LOOK = 0.2  # seconds between two looks at what others take
TICKS = 0.02  # seconds by which the system's counts, in ticks, may be off
# Fields of /proc/stat; `user` has the time of guests too.
BUSY = ("user", "nice", "system", "irq", "softirq", "steal")
MOST_SECONDS = 0.1  # waited for threads that never sleep
SLEEP_LOOK = 1e-3  # seconds between two looks at threads
BLIND_SECONDS = 0.06  # waited where the system does not say what threads do
_TASKS = Path("/proc/self/task")
_CGROUP = Path("/sys/fs/cgroup")


def cpu_quota() -> float | None:
    """Return the CPUs of the cgroup's time limit, v2 then v1; None without a limit."""
    try:
        limit, _, period = (_CGROUP / "cpu.max").read_text().partition(" ")
    except OSError:
        try:
            limit, period = ((_CGROUP / f"cpu/cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        except OSError:
            return None
    try:
        cpus = int(limit) / int(period)
    except (ValueError, ZeroDivisionError):  # "max"
        return None
    return cpus if cpus > 0 else None  # -1 in v1


def fit_threads(asked: int | None) -> Finding | None:
    """Set torch's threads to `asked`, limited by the CPU quota; report when that is fewer.

    A team of threads that uses up the quota is stopped as a whole, for most of every tenth of a second.
    """
    if asked:
        torch.set_num_threads(asked)
        return None
    cpus, threads = cpu_quota(), torch.get_num_threads()
    if cpus is None or threads <= cpus or "OMP_NUM_THREADS" in os.environ:
        return None
    torch.set_num_threads(max(1, int(cpus)))
    why = f"the container may use {cpus:g} CPUs, not {threads}; --threads, or OMP_NUM_THREADS, overrules it"
    return Finding("open", "threads", torch.get_num_threads(), why=why)


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
        ours = time.process_time() - self._own
        others = max(0.0, self._busy_seconds() - self._busy - ours - TICKS) / seconds
        return max(0.0, others - max(0, len(self._processors) - threads)), ours / seconds

    def _busy_seconds(self) -> float:
        times = psutil.cpu_times(percpu=True)
        known = [times[i] for i in self._processors if i < len(times)]
        return sum(getattr(processor, name, 0.0) for processor in known for name in BUSY)


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


def wait_for_sleep() -> None:
    """Wait until no other thread of this process runs, for `MOST_SECONDS` at most."""
    if not _TASKS.exists():
        time.sleep(BLIND_SECONDS)
        return
    until = time.perf_counter() + MOST_SECONDS
    while _others_running() and time.perf_counter() < until:
        time.sleep(SLEEP_LOOK)


def _others_running() -> bool:
    """Return whether the system has another thread of this process in the state `R`, running or ready to run."""
    this_thread = str(threading.get_native_id())
    for task in os.listdir(_TASKS):
        if task == this_thread:
            continue
        try:
            fields = (_TASKS / task / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:  # it has ended
            continue
        if fields[0] == b"R":
            return True
    return False
