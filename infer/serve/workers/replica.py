"""Server side of one tensor worker: runs batches."""

from __future__ import annotations

import time
from collections import deque

import numpy as np
from numpy.typing import DTypeLike

from ...process.channel import ClosedError
from ...process.error_messages import ErrorMessage, decode_error
from ..batching.collate import Arrays
from .messages import BatchDone, ModelSource, RunBatch, TensorLocation
from .restart_policy import (
    MessageNotSentError,
    RestartLimits,
    WatchdogLimits,
    WorkerLostError,
    WorkerSilentError,
)
from .shared_memory import SharedBuffer, SharedBufferPool
from .supervisor import SupervisedWorker

BUFFERS = 3  # one runs, one is answered, one is filled


class Replica(SupervisedWorker):
    """An executor in a worker process: `new` for each input, `begin`, `poll` or `finish`; `check_worker` in between.

    `began`: start of the model on the last batch, by the system's monotonic clock.
    """

    watched = True

    def __init__(
        self,
        source: ModelSource,
        *,
        watch: WatchdogLimits | None = None,
        restart: RestartLimits | None = None,
    ) -> None:
        self._buffers = SharedBufferPool(BUFFERS)
        self._buffer: SharedBuffer | None = None
        self._running: SharedBuffer | None = None
        self._placed: list[TensorLocation] = []
        self.began = 0.0
        self._seconds, self._slowest, self._runs = deque[float](maxlen=512), 0.0, 0
        descriptors = [buffer.descriptor for buffer in self._buffers.all]
        super().__init__(source, descriptors, watch=watch, restart=restart)

    def new(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        """Return the array in shared memory that input `name` of the next batch is written to."""
        if self._buffer is None:
            self._buffer = self._buffers.lease()
        array, offset = self._buffer.allocate(shape, dtype)
        self._placed.append((name, array.dtype.str, shape, offset))
        return array

    def begin(self, inputs: Arrays) -> None:
        """Send the batch and return at once; raise `ClosedError` or `WorkerLostError` without a worker.

        `inputs` come from `new`.
        """
        buffer, placed = self._buffer, self._placed
        assert buffer is not None and len(placed) == len(inputs)  # noqa: S101, PT018 - of our own making
        self._buffer, self._placed, self._running = None, [], buffer
        with self.channel_lock:
            try:
                self.channel.send(RunBatch(buffer.number, buffer.used, placed))
            except (ClosedError, WorkerLostError):
                self._end_batch()
                raise
        self.last_message_at, self.busy = time.monotonic(), True

    def finish(self) -> tuple[Arrays, float]:
        """Wait for the batch that `begin` sent: its outputs, views of shared memory that they keep alive, and seconds.

        Raises `WorkerLostError`, or what the model raised.
        """
        with self.channel_lock:
            try:
                while not isinstance(
                    message := self.receive(None, self._reply_timeout), BatchDone | ErrorMessage
                ):
                    pass
                return self._read_outputs(message)
            finally:
                self._end_batch()

    def not_sent(self) -> MessageNotSentError:
        """End a worker to which `begin` could not send; return the error to raise."""
        with self.channel_lock:
            return MessageNotSentError(self.reap())

    def poll(self) -> tuple[Arrays, float] | None:
        """Return the result like `finish`, or None while there is none; never blocks or kills the worker.

        Raises `ClosedError`, `WorkerLostError` or `WorkerSilentError` where `finish` (or `check_worker` when nothing
        runs) has to handle the worker's state, or what the model raised.
        """
        with self.channel_lock:
            message = self.receive_nowait()
            if message is None and time.monotonic() - self.last_message_at >= self._reply_timeout:
                raise WorkerSilentError
            if not isinstance(message, BatchDone | ErrorMessage):
                return None
            try:
                return self._read_outputs(message)
            finally:
                self._end_batch()

    @property
    def _reply_timeout(self) -> float:
        return max(self.watch.batch, 10 * self._slowest) if self.busy else self.watch.idle

    def _read_outputs(self, message: BatchDone | ErrorMessage) -> tuple[Arrays, float]:
        buffer = self._running
        assert buffer is not None  # noqa: S101 - a batch runs
        if isinstance(message, ErrorMessage):
            raise decode_error(message)
        outputs = {one[0]: buffer.view(one) for one in message.outputs}
        buffer.used = max([buffer.used, *(one[3] + outputs[one[0]].nbytes for one in message.outputs)])
        if self._buffers.free == 0:  # the results of earlier batches are still in use: copy these
            outputs = {name: array.copy() for name, array in outputs.items()}
        self._count(message.seconds)
        self.began = message.began
        return outputs, message.seconds

    def _end_batch(self) -> None:
        """Mark the batch as ended; from now on only its outputs keep the memory alive."""
        self.busy = False
        if self._running is not None:
            self._running.base = None
            self._running = None

    def abandon(self) -> None:
        """Release the buffers of a batch that will not run."""
        if self._buffer is not None:
            self._buffer.base = None
        self._buffer, self._placed = None, []

    def check_worker(self) -> None:
        """Check an idle worker; raise `WorkerLostError` when it died or is silent for too long."""
        with self.channel_lock:
            while self.receive(0, self.watch.idle) is not None:
                pass

    def close(self) -> None:
        if not self.closing:
            super().close()
            self._buffers.close()

    def _count(self, seconds: float) -> None:
        self._seconds.append(seconds)
        self._runs += 1
        self.restarts.record_success()
        if self._runs % 64 == 0:
            self._slowest = sorted(self._seconds)[int(0.99 * len(self._seconds))]
