"""Child process side: death with the parent, limits of memory and CPU time, forks. Needs the standard library alone."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

PR_SET_PDEATHSIG = 1
ADDRESSES, DATA = 0, 5  # fields of /proc/self/statm


def end_with_parent(parent: int) -> None:
    """Have the kernel end this process with the thread of `parent` that started it, also one that has ended by now."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def ignore_stop_signals() -> None:
    """Ignore SIGTERM and SIGINT, which the parent handles."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def fork(job: Callable[[], int | None]) -> int:
    """Fork a child that ends with this process; it exits with what `job` returns, 1 if that raised. Return its id."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    code = 1
    try:
        end_with_parent(parent)
        code = job() or 0
    finally:
        os._exit(code)


def confine(
    *, addresses: int | None = None, data: int | None = None, cpu_seconds: float | None = None
) -> None:
    """Let this process take so many bytes more than it holds, and so much CPU time from now on; it leaves no core file.

    `addresses`: of any kind (RLIMIT_AS); `data`: private ones (RLIMIT_DATA), among which mapped files are not. What
    goes beyond fails to be allocated. SIGPROF ends the process after `cpu_seconds` of all its threads.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for limit, field, more in (
        (resource.RLIMIT_AS, ADDRESSES, addresses),
        (resource.RLIMIT_DATA, DATA, data),
    ):
        if more is not None and sys.platform == "linux":
            held = int(Path("/proc/self/statm").read_text().split()[field]) * resource.getpagesize()
            resource.setrlimit(limit, (held + more, resource.getrlimit(limit)[1]))
    if cpu_seconds is not None:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)


def unlimit_cpu() -> None:
    """End the limit of CPU time."""
    signal.setitimer(signal.ITIMER_PROF, 0)


def process_age() -> float:
    """Return the seconds since this process was started, to 0.01 s; 0 where unknown."""
    with contextlib.suppress(OSError, AttributeError), open("/proc/self/stat", "rb") as file:
        ticks = int(file.read().rpartition(b")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return 0.0
