"""Executor thread whose batches the event loop runs while they are small, so that they cross no thread.

Waking a thread and being woken by it costs more than a small batch. So the loop takes batches, sends them and reads
their results as long as nothing blocks. Large batches and all errors it hands over to the executor's thread, which
hands control back to the loop when it has nothing more to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from ...process.channel import ClosedError
from ..workers.restart_policy import WorkerLostError, WorkerSilentError
from .collate import Arrays
from .executor import EngineHandle, PollingExecutor
from .executor_thread import POLL_SECONDS, TOO_LATE, ExecutorThread, FirstRun, raise_error
from .queue_items import BatchResult, QueueItem

SMALL_BATCH = 256 << 10  # bytes of inputs that are copied on the event loop


class LoopExecutorThread(ExecutorThread):
    """Executor thread that shares its executor with the event loop: one of the two has control.

    `_batch`: batch that the loop runs; `_descriptor`: file descriptor that the loop reads, -1 while the thread has
    control; `_handed_work`: work for the thread. All methods but `wake` and `_sleep` are called on the event loop.
    """

    executor: PollingExecutor

    def __init__(self, engine: EngineHandle, executor: PollingExecutor, number: int) -> None:
        super().__init__(engine, executor, number)
        self._batch: BatchResult | None = None
        self._descriptor = -1
        self._handed_work: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._later: asyncio.TimerHandle | None = None

    @property
    def on_loop(self) -> bool:
        """True while the event loop has control."""
        return self._descriptor >= 0

    def wake(self) -> None:
        self.engine.call_on_loop(self.poll_queue)

    def poll_queue(self) -> None:
        if self.on_loop and self._batch is None:
            self._safely(self._take_batches)

    def stop(self) -> None:
        self._release_control()
        super().wake()

    def _sleep(self, seconds: float) -> None:
        """Give control to the loop, as the thread has nothing to do, and sleep until the loop gives work."""
        self.engine.call_on_loop(self._safely, self._take_control)
        while self._handed_work is None and not self.engine.stopping and self._wakeup is not None:
            self._wakeup.wait(POLL_SECONDS)
        given, self._handed_work = self._handed_work, None
        if given is not None:
            given()

    def _take_control(self) -> None:
        loop = self.engine.loop
        if self.engine.stopping:
            return
        self._descriptor = self.executor.fileno()
        if not self.on_loop:
            self._hand_to_thread(self._check_worker)
            return
        loop.add_reader(self._descriptor, self._safely, self._on_readable)
        self._timer = loop.call_later(POLL_SECONDS, self._safely, self._tick)
        self._take_batches()

    def _release_control(self) -> None:
        self._batch = None
        for timer in (self._timer, self._later):
            if timer is not None:
                timer.cancel()
        self._timer = self._later = None
        if self.on_loop:
            self.engine.loop.remove_reader(self._descriptor)
            self._descriptor = -1

    def _hand_to_thread(self, work: Callable[[], None]) -> None:
        self._release_control()
        self._handed_work = work
        super().wake()

    def _hand_batch_to_thread(self, batch: BatchResult, first: FirstRun | None = None) -> None:
        engine = self.engine
        self._hand_to_thread(lambda: engine.call_on_loop(engine.deliver, self._complete(batch, first)))

    def _take_batches(self) -> None:
        """Take batches until one runs or none is left."""
        engine, more = self.engine, True
        while more:
            with engine.lock:
                taken = self._take_batch()
                more = bool(taken.expired and not taken.items)
                self.sleeping = not taken.items and not more
            for item in taken.expired:
                engine.expire(item.owner, TOO_LATE)
            if taken.items:
                self._run_on_loop(BatchResult(taken.items, [], engine.clock(), taken.reason))
            elif taken.wait is not None:
                self._schedule_poll(taken.wait)

    def _schedule_poll(self, seconds: float) -> None:
        """Set one timer for a delayed batch, however many items join it meanwhile."""
        loop, later = self.engine.loop, self._later
        if later is not None and later.when() <= loop.time() + seconds:
            return
        if later is not None:
            later.cancel()
        self._later = loop.call_later(seconds, self._delayed_poll)

    def _delayed_poll(self) -> None:
        self._later = None
        self.poll_queue()

    def _run_on_loop(self, batch: BatchResult) -> None:
        if sum([item.size_bytes for item in batch.items]) > SMALL_BATCH:
            self._hand_batch_to_thread(batch)
            return
        try:
            inputs = self._collate(batch.items, batch)
            try:
                self.executor.begin(inputs)
            finally:
                inputs.clear()
        except Exception:  # noqa: BLE001 - the thread tries the same, and has the time to find out what is wrong
            self._hand_batch_to_thread(batch)
        else:
            self._batch = batch

    def _on_readable(self) -> None:
        batch = self._batch
        try:
            done = self.executor.poll()
            if batch is None or done is None:
                return
            outputs, batch.compute = done
            batch.outcomes = list(self._split_outputs(outputs, batch.items, batch))
        except Exception as error:  # noqa: BLE001 - a model may raise anything
            if batch is None:
                self._hand_to_thread(self._check_worker)
            elif isinstance(error, ClosedError | WorkerLostError | WorkerSilentError | msgspec.DecodeError):
                self._hand_batch_to_thread(batch, self._finish)
            else:
                self._hand_batch_to_thread(batch, partial(raise_error, error))
            return
        del outputs, done
        self._batch = None
        self._count_run(batch)
        self.engine.deliver(batch)
        if self.on_loop:
            self._take_batches()

    def _finish(self, items: Sequence[QueueItem], batch: BatchResult) -> list[Arrays]:
        outputs, batch.compute = self.executor.finish()
        return self._split_outputs(outputs, items, batch)

    def _tick(self) -> None:
        """Poll the worker: one that hangs makes no descriptor readable."""
        self._timer = self.engine.loop.call_later(POLL_SECONDS, self._safely, self._tick)
        if self._batch is None:
            self.beat = self.engine.clock()
        self._on_readable()

    def _safely(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:  # noqa: BLE001 - as in the thread
            self._fail(error)
