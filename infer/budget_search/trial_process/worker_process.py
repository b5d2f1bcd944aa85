"""Worker process of a search: started, sent one trial at a time, monitored, and killed past a limit.

A crash, a hang, memory and disk that run out are outcomes of the trial, with a reason; the next trial gets a new
process.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from msgspec import structs

from ... import device as hardware
from ...errors import InferError
from ...process.channel import ClosedError
from ...process.error_messages import ErrorMessage, decode_error
from ...process.spawn import ChildProcess, describe_exit
from ...report.search_record import Candidate, Outcome, TrialRecord
from .messages import Answer, FromWorker, LowerBounds, Question, Setup, Step, TrialRequest, Waiting, content

SHORTEST = 1.0  # seconds: with less time left no trial is begun
MEMORY_SHARE = 0.9  # of what is free at the start, that a trial may hold
LOOK = 0.2  # seconds between two looks at memory, time and disk
TAIL = 4096  # bytes of a log that are read for the reason of a crash
GRACE = 2.0  # seconds that a worker has to end by itself

OnStep = Callable[[str, str], None]
RoundTimes = Sequence[Sequence[float]]  # seconds of a row by artifact and round


class TrialEndedError(Exception):
    """A worker answers no more: the outcome of what it did, the reason, and its seconds."""

    def __init__(self, outcome: Outcome, reason: str, took: float) -> None:
        super().__init__(f"{outcome}: {reason}")
        self.outcome, self.reason, self.took = outcome, reason, took


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
        with log.open(
            "wb"
        ) as output:  # nobody else holds our end of the channel: it closes when the search is gone
            self._process = ChildProcess(
                "infer.budget_search.trial_process.subreaper", FromWorker, output=output
            )
        with contextlib.suppress(ClosedError):
            self._process.channel.send(setup)

    def ask(self, method: str, arguments: tuple[Any, ...], limits: TrialLimits, step: OnStep) -> Any:
        """Return what a method of the worker's `Session` answers within the limits.

        Raises `TrialEndedError`, the worker being dead then unless `alive`, and the `InferError` that every trial would
        meet.
        """
        with contextlib.suppress(ClosedError):
            self._process.channel.send(Question(**{method: arguments}))
        watch = StopWatch()
        while True:
            message = self._next()
            if isinstance(message, Step):
                step(message.name, message.detail)
            elif isinstance(message, Waiting):
                watch.pause(message.began)
            elif isinstance(message, ErrorMessage):
                if isinstance(error := decode_error(message), InferError):
                    raise error
                raise TrialEndedError("failed", message.text.splitlines()[0], watch.running)
            elif isinstance(message, Answer):
                _, value = content(message)
                if not isinstance(value, TrialRecord):
                    return value
                self.trials += 1
                return structs.replace(value, took=watch.running)
            over = self._ended() if message is None and not self.alive else self._over(limits, watch)
            if over is not None:
                self.close()
                raise TrialEndedError(*over, watch.running)

    @property
    def alive(self) -> bool:
        return self._process.alive

    def close(self) -> None:
        """Kill the worker and everything that it started."""
        family = _process_tree(self._process.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for one in family:
            with contextlib.suppress(psutil.Error):
                one.kill()
        self._process.kill()

    def _over(self, limits: TrialLimits, watch: StopWatch) -> tuple[Outcome, str] | None:
        """Return outcome and reason of a trial that is past a limit."""
        if watch.running > limits.seconds:
            return "timed out", f"it took longer than {limits.seconds:.0f} s and was ended"
        if watch.running + watch.paused > limits.search_seconds:
            return "timed out", "the time of the search was over and it was ended"
        used = sum(map(_own_memory, _process_tree(self._process.pid)))
        if used > limits.memory:
            allowed = f"{limits.memory / 1e6:.0f} MB are allowed"
            return "out of memory", f"it held {used / 1e6:.0f} MB, {allowed}, and was ended"
        disk = os.statvfs(self.setup.work)
        if (free := disk.f_bavail * disk.f_frsize) < limits.disk_free:
            left = f"it left {free / 1e6:.0f} MB of the disk free, {limits.disk_free / 1e6:.0f} MB stay"
            return "disk full", f"{left}, and was ended"
        return None

    def _ended(self) -> tuple[Outcome, str]:
        """Explain a process that ended by itself, from its signal and the last line of its log."""
        code = self._process.wait() or 0
        if code == -signal.SIGKILL:
            return "out of memory", "the system killed its process (SIGKILL), as it does without memory"
        return "crashed", f"its process ended with {describe_exit(code)}{_fault_in_log(self._log)}"

    def _next(self) -> Any:
        """Return the next message; None where none came in time, or the worker closed its channel."""
        try:
            return self._process.channel.receive(LOOK)
        except ClosedError:
            self._process.wait(GRACE)
        return None


Start = Callable[[Setup, Path], WorkerProcess]


@dataclass
class Worker:
    """Trials one after the other on one machine: a process that is started when it is needed, and a new one where the
    last one can't go on. `setup.work` is the folder of its artifacts and logs; seconds left of None: no limit.
    """

    setup: Setup
    limits: TrialLimits
    start: Start = WorkerProcess
    process: WorkerProcess | None = None
    started: int = 0
    name: str = ""  # of a node of a cluster, "" for the machine of the search

    def run(self, request: TrialRequest, seconds_left: float | None, step: OnStep) -> TrialRecord:
        """Run a trial within the limits and the time left; one that kills a process that ran others before runs once
        more in a new one, alone. Raises the `InferError` that every trial would meet.
        """
        ran_others = self.process is not None and self.process.alive and self.process.trials > 0
        while True:
            try:
                record: TrialRecord = self._ask(request.candidate, "run", (request,), seconds_left, step)
                return record
            except TrialEndedError as ended:
                closed = self.process is None  # by another thread: the search has ended
                if not ran_others or closed or ended.outcome not in ("crashed", "out of memory", "failed"):
                    return TrialRecord(
                        candidate=request.candidate,
                        outcome=ended.outcome,
                        reason=ended.reason,
                        took=ended.took,
                    )
            ran_others = False
            self.close()

    def survey(
        self, candidate: Candidate, formats: Sequence[str], seconds_left: float | None, step: OnStep
    ) -> LowerBounds:
        """Return the bounds that need no trial; none of a worker that fails, as its trials will report."""
        try:
            return self._ask(candidate, "survey", (candidate, tuple(formats)), seconds_left, step)  # type: ignore[no-any-return]
        except TrialEndedError:
            return LowerBounds()

    def rounds(
        self,
        candidate: Candidate,
        artifacts: Sequence[Path],
        batches: Sequence[int],
        seconds_left: float | None,
        step: OnStep,
    ) -> RoundTimes:
        """Time published artifacts in turns, the first one that of `candidate`; raises `TrialEndedError`."""
        arguments = (candidate, tuple(map(os.fspath, artifacts)), tuple(batches))
        return self._ask(candidate, "rounds", arguments, seconds_left, step)  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the worker process and everything that it started."""
        if self.process is not None:
            self.process.close()
            self.process = None

    def _ask(
        self,
        candidate: Candidate,
        method: str,
        arguments: tuple[Any, ...],
        seconds_left: float | None,
        step: OnStep,
    ) -> Any:
        threads = candidate.threads or self.setup.plan.threads
        if self.process is not None and (
            not self.process.alive or self.process.setup.plan.threads != threads
        ):
            self.close()
        if self.process is None:
            setup = structs.replace(self.setup, plan=self.setup.plan.with_(threads=threads))
            self.process = self.start(setup, Path(setup.work) / f"worker-{self.started}.log")
            self.started += 1
        whole = math.inf if seconds_left is None else max(SHORTEST, seconds_left)
        return self.process.ask(method, arguments, replace(self.limits, search_seconds=whole), step)


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
