"""A worker process that is watched, and started again when it dies: the part that all kinds of workers share."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ...errors import ArtifactError, InferError, NotReadyError, WorkerDiedError
from .channel import Channel, ClosedError
from .messages import Card, Failed, FromWorker, ModelError, Open, Ready, Source, raised
from .process import Process
from .restart_policy import RestartLimits, Restarts

log = logging.getLogger("infer.serve")
LOOK_SECONDS = 0.1
SILENT_SECONDS = 10.0  # without a word of a worker that has nothing to do, until it counts as not ready
PAUSE_SECONDS = 3.0  # later than it should be: this process, or the machine, stood still
CLOSE_SECONDS = 0.5  # for whoever reads to let go of it


class LostError(Exception):
    """The worker died, or was killed because it hung, before it answered."""


class NotSentError(LostError):
    """The worker was dead before it could get what was to be sent to it."""


class HopelessError(InferError):
    """Starting it again does not help."""


def ended(error: BaseException) -> InferError:
    """The reason that requests get which were not answered when an engine ended for good."""
    if isinstance(error, HopelessError):
        return NotReadyError("the model's process died too often and is not started again")
    return WorkerDiedError("the engine died")


class WatchLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of silence after which a worker is killed: in a batch (at least; else ten times its p99), and else."""

    batch: float = 30.0
    idle: float = 30.0
    opening: float = 120.0


class Supervised:
    """One thread uses it, others may `close` it. `start` and `wait` come first, `card` is known then.

    `ready`: its model is open; `busy`: it was asked for something that may take long; `heard`: when it last spoke;
    `phases` and `speeds`: see `messages.Ready`.
    """

    def __init__(
        self,
        source: Source,
        descriptors: Sequence[int] = (),
        *,
        watch: WatchLimits | None = None,
        restart: RestartLimits | None = None,
    ) -> None:
        self.source, self.watch = source, watch or WatchLimits()
        self.restarts = Restarts(restart or RestartLimits())
        self.card: Card | None = None
        self.phases: dict[str, float] = {}
        self.speeds: list[tuple[int, float]] = []
        self.ready = self.closing = self.busy = False
        self.heard = self._listened = time.monotonic()
        self.using = threading.Lock()  # held while the channel is read
        self._descriptors = list(descriptors)
        self._process: Process | None = None

    @property
    def answering(self) -> bool:
        """It is open, and has something to do or gave a sign of life, which it only does when it can answer."""
        return self.ready and (self.busy or time.monotonic() - self.heard < SILENT_SECONDS)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def fileno(self) -> int:
        """Readable when the worker said something."""
        return -1 if self._process is None else self._process.channel.fileno()

    @property
    def channel(self) -> Channel[Any]:
        """Raises `LostError` while there is no process."""
        process = self._process
        if process is None:
            raise LostError("it is not running")
        return process.channel

    def start(self) -> None:
        """Start the process; it opens its model while the caller goes on."""
        self.heard = time.monotonic()
        self._process = Process(FromWorker, self._descriptors)
        with contextlib.suppress(ClosedError):  # noticed by `wait`
            self.channel.send(Open(self.source, again=self.card is not None))

    def wait(self) -> Card:
        """Until it is ready. Raises what opening the model raised, or `LostError`."""
        while True:
            message = self.hear(LOOK_SECONDS, self.watch.opening)
            if self.closing:
                raise LostError("the server is stopping")
            if isinstance(message, Failed):
                raise raised(message)
            if isinstance(message, Ready):
                if self.card is not None and message.card != self.card:
                    raise ArtifactError("it was replaced while it was served", where=self.source.path)
                self.card, self.phases, self.ready = message.card, message.phases, True
                self.speeds = message.speeds or self.speeds
                if message.tested:
                    self.restarts.proved()
                return message.card

    def hear(self, seconds: float | None, patience: float) -> Any:
        """The next message, or None after `seconds`. Raises `LostError` after `patience` without any."""
        began = time.monotonic()
        self._overslept(began - self._listened)
        left = max(self.heard + patience - began, 0.0)
        asked = left if seconds is None else min(seconds, left)
        try:
            message = self.channel.receive(asked)
        except (ClosedError, msgspec.DecodeError) as error:
            raise self.lost() from error
        self._listened = time.monotonic()
        if message is not None:
            self.heard = self._listened
            return message
        self._overslept(self._listened - began - asked)
        if self._listened - self.heard >= patience:
            raise self.hung(patience)
        return None

    def listen(self) -> Any:
        """The next message, if it is there, or None. Raises `ClosedError`, which `hear` says what to make of."""
        self._overslept(time.monotonic() - self._listened)
        message = self.channel.receive(0)
        self._listened = time.monotonic()
        if message is not None:
            self.heard = self._listened
        return message

    def _overslept(self, seconds: float) -> None:
        """Time in which nobody listened is no silence: a machine that was paused wakes its processes in any order."""
        if seconds > PAUSE_SECONDS:
            self.heard = min(self.heard + seconds, time.monotonic())

    def lost(self) -> LostError:
        """To be raised when the channel is closed."""
        return LostError(self._ended())

    def not_sent(self) -> NotSentError:
        """The same, where a message could not be sent."""
        return NotSentError(self._ended())

    def _ended(self) -> str:
        how = self._process.exit if self._process is not None else "it is not running"
        self._end()
        return how

    def hung(self, seconds: float) -> LostError:
        """To be raised when nothing came for so long; it is killed."""
        self._end()
        return LostError(f"killed after {seconds:.0f} s of silence")

    def excuse(self) -> None:
        """See `Restarts.excuse`."""
        self.restarts.excuse()

    def restart(self, stopping: Callable[[], bool]) -> None:
        """Start it again, as often as that is sensible; returns when it is ready, or `stopping`.

        Raises `HopelessError`.
        """

        def over() -> bool:
            return self.closing or stopping()

        with self.using:
            while not over():
                if (pause := self.restarts.died()) is None:
                    raise HopelessError(f"the worker of {self.source.path} died too often")
                until = time.monotonic() + pause
                while time.monotonic() < until and not over():
                    time.sleep(min(LOOK_SECONDS, pause))
                if over():
                    return
                try:
                    self.start()
                    self.wait()
                except (LostError, InferError, ModelError, OSError, MemoryError) as error:
                    self._end()
                    log.error("the worker of %s did not start again: %s", self.source.path, error)
                    continue
                log.warning("the worker of %s was started again", self.source.path)
                return

    def close(self) -> None:
        """End the process, at once when it is busy; may be called twice."""
        if self.closing:
            return
        self.closing = True
        process = self._process
        if self.using.acquire(timeout=CLOSE_SECONDS):
            if process is not None:
                process.kill() if self.busy else process.close()
        else:
            if process is not None:
                process.kill()
            self.using.acquire()
        try:
            self._end()
        finally:
            self.using.release()

    def _end(self) -> None:
        self.ready = False
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.channel.close()
