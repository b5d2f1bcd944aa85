"""Threads of this process that still wait in a loop for work after a call has returned.

OpenMP's threads spin for 7 ms after their last call, those of ONNX Runtime for 50 (Zen 3, two cores). Whatever else is
called meanwhile shares its processors with them: two equal sessions of ONNX Runtime, timed in turns, took 6.3 ms a call
where each alone takes 2.4, and one was "faster" by 1.2.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

MOST_SECONDS = 0.1  # waited for threads that never sleep
LOOK = 1e-3  # seconds between two looks
BLIND_SECONDS = 0.06  # waited where the system does not say what threads do
_TASKS = Path("/proc/self/task")


def wait_for_sleep() -> None:
    """Wait until no other thread of this process runs, for `MOST_SECONDS` at most."""
    if not _TASKS.exists():
        time.sleep(BLIND_SECONDS)
        return
    until = time.perf_counter() + MOST_SECONDS
    while _others_running() and time.perf_counter() < until:
        time.sleep(LOOK)


def _others_running() -> bool:
    """Return whether the system has another thread of this process in the state `R`, running or ready to run."""
    own = str(threading.get_native_id())
    for task in os.listdir(_TASKS):
        if task == own:
            continue
        try:
            fields = (_TASKS / task / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:  # it has ended
            continue
        if fields[0] == b"R":
            return True
    return False
