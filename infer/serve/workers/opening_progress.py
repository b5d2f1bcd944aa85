"""Progress of a worker that opens its model: where it is, and if it still does anything.

Heartbeats come from a thread of their own: they show that the process lives, not that it gets anywhere.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import psutil

from .messages import Heartbeat

log = logging.getLogger("infer.serve")
BEAT_SECONDS = 1.0
REPORT_SECONDS = 30.0  # between two lines about an opening that is not done
LEAST_WORK = 0.01  # CPU seconds between two looks that count as progress
READ_WORK = 0.01  # that one page fault or block read counts as
PACKAGE = str(Path(__file__).resolve().parents[2])


class OpeningProgress:
    """State of an opening, in the worker. `phase`: set by the thread that opens."""

    def __init__(self) -> None:
        self.phase = "starting"

    def heartbeat(self) -> Heartbeat:
        """Return the next heartbeat; call from the thread that sends them."""
        return Heartbeat(doing=f"{self.phase}, in {main_thread_place()}", work=work_done())


def work_done() -> float:
    """Return a number that changes while this process, its children or its disk work for another than this thread."""
    import resource  # not on Windows, where there are no workers

    used = resource.getrusage(resource.RUSAGE_SELF)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() - time.thread_time() + ended.ru_utime + ended.ru_stime
    total += READ_WORK * (used.ru_majflt + used.ru_inblock)
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            total += sum(child.cpu_times()[:2])
    return total


def main_thread_place() -> str:
    """Return the innermost line of the main thread, and of this package where that is another."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    found: list[str] = []
    while frame is not None and len(found) < 2:
        if not found or frame.f_code.co_filename.startswith(PACKAGE):
            found.append(_place(frame))
            if frame.f_code.co_filename.startswith(PACKAGE):
                break
        frame = frame.f_back
    return ", called by ".join(found) or "no Python code"


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


class OpeningWatch:
    """Judgement of a worker's heartbeats, in the server; says every `REPORT_SECONDS` what is waited for.

    `limit`: seconds without progress after which the opening counts as hung. They are counted in heartbeats, so that a
    machine that stood still, or is busy with others, is not held against the worker.
    """

    def __init__(
        self, path: str, pid: int | None, limit: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.doing = "starting Python"
        self._path, self._pid, self._limit, self._clock = path, pid, limit, clock
        self._began = clock()
        self._next_report = self._began + REPORT_SECONDS
        self._work, self._still = 0.0, 0.0

    def note(self, beat: Heartbeat) -> None:
        """Process one heartbeat of a worker that opens its model."""
        moved = abs(beat.work - self._work) >= LEAST_WORK
        self._still = 0.0 if moved else self._still + BEAT_SECONDS
        if moved:
            self._work = beat.work
        self.doing = beat.doing or self.doing

    @property
    def hung(self) -> bool:
        return self._still >= self._limit

    def report(self) -> None:
        """Log what the worker is doing, when it is time."""
        now = self._clock()
        if now >= self._next_report:
            self._next_report = now + REPORT_SECONDS
            log.warning(
                "the worker of %s (process %s) is not ready after %.0f s: %s",
                *(self._path, self._pid, now - self._began, self.doing),
            )
