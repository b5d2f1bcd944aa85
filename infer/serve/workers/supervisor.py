"""A supervised worker process: watchdog and restarts, shared by all kinds of workers."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ...errors import ArtifactError, InferError
from ...process.channel import Channel, ClosedError
from ...process.error_messages import ChildError, ErrorMessage, decode_error
from ...process.spawn import ChildProcess, describe_exit
from .messages import (
    FromWorker,
    Heartbeat,
    LoadModel,
    ModelSource,
    ShutDown,
    WorkerReady,
)
from .opening_progress import OpeningWatch
from .restart_policy import (
    RestartLimitError,
    RestartLimits,
    RestartPolicy,
    WatchdogLimits,
    WorkerLostError,
)

log = logging.getLogger("infer.serve")
LOOK_SECONDS = 0.1
SILENT_SECONDS = 10.0  # without a word of a worker that has nothing to do, until it counts as not ready
PAUSE_SECONDS = 3.0  # later than it should be: this process, or the machine, stood still
CLOSE_SECONDS = 0.5  # for the reading thread to release it


class SupervisedWorker:
    """A worker process; one thread uses it, others may `close` it.

    Call `start` and `wait` first. `opened`: what it said when its model was open; `ready`: it is open now; `busy`: a
    long operation was requested; `last_message_at`: monotonic time of its last message.
    """

    def __init__(
        self,
        source: ModelSource,
        descriptors: Sequence[int] = (),
        *,
        watch: WatchdogLimits | None = None,
        restart: RestartLimits | None = None,
    ) -> None:
        self.source, self.watch = source, watch or WatchdogLimits()
        self.restarts = RestartPolicy(restart or RestartLimits())
        self.opened: WorkerReady | None = None
        self.ready = self.closing = self.busy = False
        self.last_message_at = self._last_read_at = time.monotonic()
        self.channel_lock = threading.Lock()  # held while the channel is read
        self._descriptors = list(descriptors)
        self._process: ChildProcess | None = None

    @property
    def answering(self) -> bool:
        """True when the model is open, and the worker is busy or sent a recent heartbeat."""
        return self.ready and (self.busy or time.monotonic() - self.last_message_at < SILENT_SECONDS)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def fileno(self) -> int:
        """Return a descriptor that is readable when the worker sent a message, -1 without a worker."""
        return -1 if self._process is None else self._process.channel.fileno()

    @property
    def channel(self) -> Channel[Any]:
        """The channel; raises `WorkerLostError` while there is no process."""
        process = self._process
        if process is None:
            raise WorkerLostError("it is not running")
        return process.channel

    def start(self) -> None:
        """Start the process; it opens its model in the background."""
        self.last_message_at = time.monotonic()
        self._process = ChildProcess("infer.serve.workers", FromWorker, self._descriptors)
        with contextlib.suppress(ClosedError):  # noticed by `wait`
            self.channel.send(LoadModel(self.source, again=self.opened is not None))

    def wait(self) -> WorkerReady:
        """Wait until the worker is ready and return its word; raise what opening raised, or `WorkerLostError`."""
        opening = OpeningWatch(self.source.path, self.pid, self.watch.opening)
        while True:
            message = self.receive(LOOK_SECONDS, self.watch.opening)
            if self.closing:
                raise WorkerLostError("the server is stopping")
            if isinstance(message, Heartbeat):
                opening.note(message)
            opening.report()
            if opening.hung:
                raise self.kill_hung(self.watch.opening, f"without progress: {opening.doing}")
            if isinstance(message, ErrorMessage):
                raise decode_error(message)
            if isinstance(message, WorkerReady):
                if self.opened is not None:
                    if (message.info, message.language_model) != (
                        self.opened.info,
                        self.opened.language_model,
                    ):
                        raise ArtifactError("it was replaced while it was served", where=self.source.path)
                    message.speeds = message.speeds or self.opened.speeds
                self.opened, self.ready = message, True
                if message.tested:
                    self.restarts.record_self_test()
                return message

    def receive(self, seconds: float | None, patience: float) -> Any:
        """Return the next message, or None after `seconds`.

        Raises `WorkerLostError` after `patience` seconds without any.
        """
        began = time.monotonic()
        self._discount_pause(began - self._last_read_at)
        left = max(self.last_message_at + patience - began, 0.0)
        asked = left if seconds is None else min(seconds, left)
        try:
            message = self.channel.receive(asked)
        except (ClosedError, msgspec.DecodeError) as error:
            raise WorkerLostError(self.reap()) from error
        self._last_read_at = time.monotonic()
        if message is not None:
            self.last_message_at = self._last_read_at
            return message
        self._discount_pause(self._last_read_at - began - asked)
        if self._last_read_at - self.last_message_at >= patience:
            raise self.kill_hung(patience)
        return None

    def receive_nowait(self) -> Any:
        """Return a message that is there, or None; raise `ClosedError` at the end."""
        self._discount_pause(time.monotonic() - self._last_read_at)
        message = self.channel.receive(0)
        self._last_read_at = time.monotonic()
        if message is not None:
            self.last_message_at = self._last_read_at
        return message

    def _discount_pause(self, seconds: float) -> None:
        """Discount time in which nothing was read from the silence of the worker.

        After a suspend of the machine, processes wake up in any order.
        """
        if seconds > PAUSE_SECONDS:
            self.last_message_at = min(self.last_message_at + seconds, time.monotonic())

    def reap(self) -> str:
        """End the process behind a channel that is closed; return how it ended."""
        if self._process is None:
            return "it is not running"
        code = self._process.wait()
        self._kill_process()
        return "it hung up and runs on" if code is None else describe_exit(code)

    def kill_hung(self, seconds: float, how: str = "of silence") -> WorkerLostError:
        """Kill a worker that hung for `seconds`; return the error to raise."""
        self._kill_process()
        return WorkerLostError(f"killed after {seconds:.0f} s {how}")

    def blame_request(self) -> None:
        """Attribute a death to a request; see `RestartPolicy.blame_request`."""
        self.restarts.blame_request()

    def restart(self, stopping: Callable[[], bool]) -> None:
        """Restart the worker within its limits; return when it is ready, or on `stopping`.

        Raises `RestartLimitError`.
        """

        def over() -> bool:
            return self.closing or stopping()

        with self.channel_lock:
            while not over():
                if (pause := self.restarts.record_death()) is None:
                    raise RestartLimitError(f"the worker of {self.source.path} died too often")
                until = time.monotonic() + pause
                while time.monotonic() < until and not over():
                    time.sleep(min(LOOK_SECONDS, pause))
                if over():
                    return
                try:
                    self.start()
                    self.wait()
                except (WorkerLostError, InferError, ChildError, OSError, MemoryError) as error:
                    self._kill_process()
                    log.error("the worker of %s did not start again: %s", self.source.path, error)
                    continue
                log.warning("the worker of %s was started again", self.source.path)
                return

    def close(self) -> None:
        """End the process, by a kill when it is busy; may be called twice."""
        if self.closing:
            return
        self.closing = True
        process = self._process
        if self.channel_lock.acquire(timeout=CLOSE_SECONDS):
            if process is not None:
                process.kill() if self.busy else process.close(ShutDown())
        else:
            if process is not None:
                process.kill()
            self.channel_lock.acquire()
        try:
            self._kill_process()
        finally:
            self.channel_lock.release()

    def _kill_process(self) -> None:
        self.ready = False
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.channel.close()
