"""Worker process of a search: started, sent one trial at a time, monitored, and killed past a limit.

A crash, a hang, memory and disk that run out are outcomes of the trial, with a reason; the next trial gets a new
process.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from ... import device as hardware
from .messages import Answer, Done, Inquiry, Question, Result, Setup, StepStarted, Waiting

MEMORY_SHARE = 0.9  # of what is free at the start, that a trial may hold
LOOK = 0.2  # seconds between two looks at memory, time and disk
TAIL = 4096  # bytes of a log that are read for the reason of a crash
GRACE = 2.0  # seconds that a worker has to end by itself


@dataclass(frozen=True)
class TrialLimits:
    """Limits of one trial: seconds, resident bytes that belong to its processes alone, bytes left free on its disk.

    While a trial waits for other searches on the machine only `search_seconds`, what is left of --time, go on.
    """

    seconds: float = 3600.0
    memory: int = 1 << 62
    disk_free: int = 256 << 20
    search_seconds: float = math.inf


def default_limits() -> TrialLimits:
    """Return the limits of a trial on this machine: memory by what is free now."""
    return TrialLimits(memory=int(MEMORY_SHARE * hardware.memory_available()))


class StopWatch:
    """Stop watch that does not count the time between `pause(True)` and `pause(False)`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._start = clock, clock()
        self._done, self._since = 0.0, math.inf

    def pause(self, began: bool) -> None:
        now = self._clock()
        if began:
            self._since = min(self._since, now)
        elif self._since < now:
            self._done, self._since = self._done + now - self._since, math.inf

    @property
    def paused(self) -> float:
        """Seconds of all pauses, one that goes on included."""
        return self._done + max(0.0, self._clock() - self._since)

    @property
    def running(self) -> float:
        """Seconds without the pauses."""
        return self._clock() - self._start - self.paused


class WorkerProcess:
    """One worker process with its descendants. `trials` counts those that it finished."""

    def __init__(self, setup: Setup, log: Path) -> None:
        self.setup, self.trials = setup, 0
        self._log = log
        child_reads, self._to = os.pipe()
        self._from, child_writes = os.pipe()
        child_watches, self._life = os.pipe()  # nothing is written: it closes when the search is gone
        command = [sys.executable, "-m", "infer.budget_search.trial_process.subreaper"]
        command += [str(child_reads), str(child_writes), str(child_watches)]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(child_reads, child_writes, child_watches),
                start_new_session=True,  # Ctrl-C is for the search; the group can be killed as a whole
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        for handle in (child_reads, child_writes, child_watches):
            os.close(handle)
        self._rest = b""
        with contextlib.suppress(BrokenPipeError):
            self._send(setup)

    def run(self, question: Inquiry, limits: TrialLimits, step: Callable[[str, str], None]) -> Result:
        """Answer a question within the limits; the worker is dead afterwards unless `alive`."""
        with contextlib.suppress(BrokenPipeError):
            self._send(question)
        watch = StopWatch()
        while True:
            answer = self._next(LOOK)
            if isinstance(answer, StepStarted):
                step(answer.name, answer.detail)
            elif isinstance(answer, Waiting):
                watch.pause(answer.began)
            elif isinstance(answer, Done):
                self.trials += 1
                return msgspec.structs.replace(answer, waited=watch.paused)
            elif answer is not None:
                return answer
            elif self._process.poll() is not None:
                self.close()
                return msgspec.structs.replace(self._ended(), waited=watch.paused)
            if (outcome := self._over(limits, watch)) is not None:
                self.close()
                return msgspec.structs.replace(outcome, waited=watch.paused)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Kill the worker and everything that it started."""
        family = _process_tree(self._process.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for one in family:
            with contextlib.suppress(psutil.Error):
                one.kill()
        self._process.wait()
        for handle in (self._to, self._from, self._life):
            with contextlib.suppress(OSError):
                os.close(handle)
        self._to = self._from = self._life = -1

    def _over(self, limits: TrialLimits, watch: StopWatch) -> Done | None:
        """Return the outcome of a trial that is past a limit."""
        if watch.running > limits.seconds:
            return Done(
                outcome="timed out", reason=f"it took longer than {limits.seconds:.0f} s and was ended"
            )
        if watch.running + watch.paused > limits.search_seconds:
            return Done(outcome="timed out", reason="the time of the search was over and it was ended")
        used = sum(map(_own_memory, _process_tree(self._process.pid)))
        if used > limits.memory:
            reason = f"it held {used / 1e6:.0f} MB, {limits.memory / 1e6:.0f} MB are allowed, and was ended"
            return Done(outcome="out of memory", reason=reason)
        disk = os.statvfs(self.setup.work)
        if (free := disk.f_bavail * disk.f_frsize) < limits.disk_free:
            left = f"it left {free / 1e6:.0f} MB of the disk free, {limits.disk_free / 1e6:.0f} MB stay"
            reason = f"{left}, and was ended"
            return Done(outcome="disk full", reason=reason)
        return None

    def _ended(self) -> Done:
        """Explain a process that ended by itself, from its signal and the last line of its log."""
        code = self._process.returncode
        last = _fault_in_log(self._log)
        if code == -signal.SIGKILL:
            return Done(
                outcome="out of memory",
                reason="the system killed its process (SIGKILL), as it does without memory",
            )
        if code < 0:
            with contextlib.suppress(ValueError):
                name = signal.Signals(-code).name
                return Done(outcome="crashed", reason=f"its process ended with {name}{last}")
        return Done(outcome="crashed", reason=f"its process ended with exit code {code}{last}")

    def _send(self, message: Question) -> None:
        data = msgspec.json.encode(message) + b"\n"
        while data:
            data = data[os.write(self._to, data) :]

    def _next(self, seconds: float) -> Answer | None:
        """Return the next message, or None when none came in time or the worker closed its pipe."""
        end = time.monotonic() + seconds
        while b"\n" not in self._rest:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._from], [], [], left)[0]:
                return None
            piece = os.read(self._from, 1 << 16)
            if not piece:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(GRACE)
                return None
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return msgspec.json.decode(line, type=Answer)  # type: ignore[no-any-return]


def _process_tree(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.Error:
        return []


def _own_memory(process: psutil.Process) -> int:
    """Return the resident bytes that are not shared with files, which the kernel could not take back."""
    try:
        held = process.memory_info()
    except psutil.Error:
        return 0
    return int(held.rss - getattr(held, "shared", 0))


def _fault_in_log(log: Path) -> str:
    """Return the fault that a log ends with, and the innermost Python frame of it, for display."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    current = next((i for i, line in enumerate(lines) if line.startswith("Current thread")), 0)
    frames = [line.strip() for line in lines[current:] if line.startswith("  File ")]
    if frames:
        return f", in {frames[0].removeprefix('File ')}"
    said = [line.strip() for line in lines if line.strip()]
    return f": {said[-1][:200]}" if said else ""
