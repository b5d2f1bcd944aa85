"""The front's side of one worker of tensors: it runs batches, and it is started again when it dies."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from ...errors import ArtifactError, InferError
from ..arrays import Arrays
from .channel import Channel, ClosedError
from .messages import Card, Done, Failed, FromTensors, Open, Placed, Ready, Run, Source, raised
from .process import Process
from .restarts import RestartLimits, Restarts
from .slab import Slab, Slabs

log = logging.getLogger("infer.serve")
SLABS = 3  # one runs, one is answered, one is filled
LOOK_SECONDS = 0.1


class LostError(Exception):
    """The worker died, or was killed because it hung, before it answered."""


class HopelessError(InferError):
    """Starting it again does not help."""


class WatchLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of silence after which a worker is killed: in a batch (at least; else ten times its p99), and else."""

    batch: float = 30.0
    idle: float = 30.0
    opening: float = 120.0


class Replica:
    """One thread uses it (see `lane`), others may `close` it. `start` and `wait` come first, `card` is known then."""

    watched = True

    def __init__(
        self, source: Source, *, watch: WatchLimits | None = None, restart: RestartLimits | None = None
    ) -> None:
        self.source, self.watch = source, watch or WatchLimits()
        self.restarts = Restarts(restart or RestartLimits())
        self.card: Card | None = None
        self.phases: dict[str, float] = {}
        self.ready = self.closing = False
        self.heard = time.monotonic()
        self._slabs = Slabs(SLABS)
        self._slab: Slab | None = None
        self._placed: list[Placed] = []
        self._process: Process | None = None
        self._seconds, self._slowest = deque[float](maxlen=512), 0.0
        self._using = threading.Lock()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def fileno(self) -> int:
        """Readable when there is something for `look`."""
        return -1 if self._process is None else self._process.channel.fileno()

    def start(self) -> None:
        """Start the process; it opens its model while the caller goes on."""
        self.heard = time.monotonic()
        self._process = Process(FromTensors, [slab.descriptor for slab in self._slabs.all])
        with contextlib.suppress(ClosedError):  # noticed by `wait`
            self._channel.send(Open(self.source))

    def wait(self) -> Card:
        """Until it is ready. Raises what opening the model raised, or `LostError`."""
        while True:
            message = self._hear(LOOK_SECONDS, self.watch.opening)
            if self.closing:
                raise LostError("the server is stopping")
            if isinstance(message, Failed):
                raise raised(message)
            if isinstance(message, Ready):
                if self.card is not None and message.card != self.card:
                    raise ArtifactError("it was replaced while it was served", where=self.source.path)
                self.card, self.phases, self.ready = message.card, message.phases, True
                return message.card

    def new(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Where input `name` of the next batch is to be put."""
        if self._slab is None:
            self._slab = self._slabs.lease()
        array, offset = self._slab.new(shape, dtype)
        self._placed.append((name, array.dtype.str, shape, offset))
        return array

    def run(self, inputs: Arrays) -> tuple[Arrays, float]:
        """Outputs, in shared memory that they keep alive, and the model's seconds; `inputs` come from `new`.

        Raises `LostError`, or what the model raised.
        """
        slab, placed = self._slab, self._placed
        assert slab is not None and len(placed) == len(inputs)  # noqa: S101, PT018 - of our own making
        self._slab, self._placed = None, []
        with self._using:
            try:
                try:
                    self._channel.send(Run(slab.number, slab.used, placed))
                except ClosedError as error:
                    raise self._lost() from error
                while not isinstance(message := self._hear(None, self._patience()), Done | Failed):
                    pass
                if isinstance(message, Failed):
                    raise raised(message)
                outputs = {one[0]: slab.at(one) for one in message.outputs}
                slab.used = max([slab.used, *(one[3] + outputs[one[0]].nbytes for one in message.outputs)])
            finally:
                slab.whole = None
        if not self._slabs.free:  # somebody keeps the answers of earlier batches: keep none of this one
            outputs = {name: array.copy() for name, array in outputs.items()}
        self._count(message.seconds)
        return outputs, message.seconds

    def abandon(self) -> None:
        """The batch for which `new` was called will not run."""
        if self._slab is not None:
            self._slab.whole = None
        self._slab, self._placed = None, []

    def look(self) -> None:
        """While there is nothing to do: raises `LostError` when it died or is silent for too long."""
        with self._using:
            while self._hear(0, self.watch.idle) is not None:
                pass

    def restart(self, stopping: Callable[[], bool]) -> None:
        """Start it again, as often as that is sensible; returns when it is ready, or `stopping`.

        Raises `HopelessError`.
        """
        with self._using:
            while not (stopping() or self.closing):
                if (pause := self.restarts.died()) is None:
                    raise HopelessError(f"the worker of {self.source.path} died too often")
                until = time.monotonic() + pause
                while time.monotonic() < until and not (stopping() or self.closing):
                    time.sleep(min(LOOK_SECONDS, pause))
                if stopping() or self.closing:
                    return
                try:
                    self.start()
                    self.wait()
                except (LostError, InferError) as error:
                    self._end()
                    log.error("the worker of %s did not start again: %s", self.source.path, error)
                    continue
                log.warning("the worker of %s was started again", self.source.path)
                return

    def close(self) -> None:
        """End the process, at once when it runs a batch; may be called twice."""
        if self.closing:
            return
        self.closing = True
        process = self._process
        if self._using.acquire(blocking=False):
            if process is not None:
                process.close()
        else:
            if process is not None:
                process.kill()
            self._using.acquire()
        try:
            self._end()
            self._slabs.close()
        finally:
            self._using.release()

    @property
    def _channel(self) -> Channel[Any]:
        if self._process is None:
            raise LostError("it is not running")
        return self._process.channel

    def _hear(self, seconds: float | None, patience: float) -> Any:
        """The next message, beats included, or None after `seconds`. Raises `LostError` after so long a silence."""
        left = max(self.heard + patience - time.monotonic(), 0.0)
        try:
            message = self._channel.receive(left if seconds is None else min(seconds, left))
        except (ClosedError, msgspec.DecodeError) as error:
            raise self._lost() from error
        if message is not None:
            self.heard = time.monotonic()
            return message
        if time.monotonic() - self.heard >= patience:
            self.ready = False
            if self._process is not None:
                self._process.kill()
            raise LostError(f"killed after {patience:.0f} s of silence")
        return None

    def _lost(self) -> LostError:
        how = self._process.exit if self._process is not None else "it is not running"
        self._end()
        return LostError(how)

    def _end(self) -> None:
        self.ready = False
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.channel.close()

    def _patience(self) -> float:
        self.heard = time.monotonic()  # a batch begins
        return max(self.watch.batch, 10 * self._slowest)

    def _count(self, seconds: float) -> None:
        self._seconds.append(seconds)
        self.restarts.works()
        if len(self._seconds) % 64 == 0:
            self._slowest = sorted(self._seconds)[int(0.99 * len(self._seconds))]
