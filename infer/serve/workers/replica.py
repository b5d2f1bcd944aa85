"""The front's side of one worker of tensors: it runs batches."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np

from ..batching.run_arrays import Arrays
from .channel import ClosedError
from .messages import Done, Failed, Placed, Run, Source, raised
from .restart_policy import RestartLimits
from .shared_memory import Slab, Slabs
from .supervisor import LostError, Supervised, WatchLimits

SLABS = 3  # one runs, one is answered, one is filled


class SilentError(Exception):
    """Nothing was heard of the worker for longer than that should take."""


class Replica(Supervised):
    """An executor of `lane`: `new` for each input, then `run`; `look` in between.

    `began`: when its model was given the batch that it answered last, by its own reading of the monotonic clock.
    """

    watched = True

    def __init__(
        self, source: Source, *, watch: WatchLimits | None = None, restart: RestartLimits | None = None
    ) -> None:
        self._slabs = Slabs(SLABS)
        self._slab: Slab | None = None
        self._running: Slab | None = None
        self._placed: list[Placed] = []
        self.began = 0.0
        self._seconds, self._slowest, self._runs = deque[float](maxlen=512), 0.0, 0
        descriptors = [slab.descriptor for slab in self._slabs.all]
        super().__init__(source, descriptors, watch=watch, restart=restart)

    def new(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Where input `name` of the next batch is to be put."""
        if self._slab is None:
            self._slab = self._slabs.lease()
        array, offset = self._slab.new(shape, dtype)
        self._placed.append((name, array.dtype.str, shape, offset))
        return array

    def run(self, inputs: Arrays) -> tuple[Arrays, float]:
        """Outputs, in shared memory that they keep alive, and the model's seconds; `inputs` come from `new`.

        Raises `LostError`, `NotSentError` where it was dead before, or what the model raised.
        """
        try:
            self.begin(inputs)
        except (ClosedError, LostError) as error:
            with self.using:
                raise self.not_sent() from error
        return self.finish()

    def begin(self, inputs: Arrays) -> None:
        """The first half of `run`, which waits for nothing; raises `ClosedError` or `LostError` without a worker."""
        slab, placed = self._slab, self._placed
        assert slab is not None and len(placed) == len(inputs)  # noqa: S101, PT018 - of our own making
        self._slab, self._placed, self._running = None, [], slab
        with self.using:
            try:
                self.channel.send(Run(slab.number, slab.used, placed))
            except (ClosedError, LostError):
                self._over()
                raise
        self.heard, self.busy = time.monotonic(), True

    def finish(self) -> tuple[Arrays, float]:
        """The second half of it."""
        with self.using:
            try:
                while not isinstance(message := self.hear(None, self._patience), Done | Failed):
                    pass
                return self._answer(message)
            finally:
                self._over()

    def poll(self) -> tuple[Arrays, float] | None:
        """What `finish` gives, or None while it would wait, or after it; never kills anybody, nor waits for it.

        Raises `ClosedError`, `LostError` or `SilentError` where `finish`, or `look` when nothing runs, has to look
        into it; or what the model raised.
        """
        with self.using:
            message = self.listen()
            if message is None and time.monotonic() - self.heard >= self._patience:
                raise SilentError
            if not isinstance(message, Done | Failed):
                return None
            try:
                return self._answer(message)
            finally:
                self._over()

    @property
    def _patience(self) -> float:
        return max(self.watch.batch, 10 * self._slowest) if self.busy else self.watch.idle

    def _answer(self, message: Done | Failed) -> tuple[Arrays, float]:
        slab = self._running
        assert slab is not None  # noqa: S101 - a batch runs
        if isinstance(message, Failed):
            raise raised(message)
        outputs = {one[0]: slab.at(one) for one in message.outputs}
        slab.used = max([slab.used, *(one[3] + outputs[one[0]].nbytes for one in message.outputs)])
        if self._slabs.free == 0:  # somebody keeps the answers of earlier batches: keep none of this one
            outputs = {name: array.copy() for name, array in outputs.items()}
        self._count(message.seconds)
        self.began = message.began
        return outputs, message.seconds

    def _over(self) -> None:
        """Nothing runs any more; only what was made of the outputs keeps the memory."""
        self.busy = False
        if self._running is not None:
            self._running.whole = None
            self._running = None

    def abandon(self) -> None:
        """The batch for which `new` was called will not run."""
        if self._slab is not None:
            self._slab.whole = None
        self._slab, self._placed = None, []

    def look(self) -> None:
        """While there is nothing to do: raises `LostError` when it died or is silent for too long."""
        with self.using:
            while self.hear(0, self.watch.idle) is not None:
                pass

    def close(self) -> None:
        if not self.closing:
            super().close()
            self._slabs.close()

    def _count(self, seconds: float) -> None:
        self._seconds.append(seconds)
        self._runs += 1
        self.restarts.works()
        if self._runs % 64 == 0:
            self._slowest = sorted(self._seconds)[int(0.99 * len(self._seconds))]
