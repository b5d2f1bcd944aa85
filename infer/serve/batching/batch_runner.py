"""Executors of a model, in this process or another, and their runs of batches, driven by the event loop.

The event loop sends a batch and reads its results itself: waking a thread and being woken by it would cost more than a
small batch. A thread makes the calls that block: of models in this process, copies of large inputs, and the end and
restart of a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import DTypeLike

from ...errors import DeadlineError, InferError, PoisonError, WorkerDiedError
from ...process.channel import ClosedError
from ..workers.replica import Replica
from ..workers.restart_policy import (
    MessageNotSentError,
    Quarantine,
    WorkerLostError,
    WorkerSilentError,
    digest_of,
)
from .collate import Arrays, Collator
from .queue_items import BatchResult, NextBatch, Outcome, QueueItem

log = logging.getLogger("infer.serve")
POLL_SECONDS = 1.0
SMALL_BATCH = 256 << 10  # bytes of inputs that are copied on the event loop
R = TypeVar("R")
Call = tuple[asyncio.AbstractEventLoop, asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]]


class LocalExecutor:
    """Executor that runs a model in this process."""

    answering, watched = True, False
    pid: int | None = None
    began = 0.0

    def __init__(self, run: Callable[[Arrays], Arrays], clock: Callable[[], float]) -> None:
        self._run, self._clock = run, clock

    def fileno(self) -> int:
        return -1

    def new(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        return np.empty(shape, dtype)

    def run(self, inputs: Arrays) -> tuple[Arrays, float]:
        began = self._clock()
        outputs = self._run(inputs)
        return outputs, self._clock() - began

    def abandon(self) -> None:
        pass

    def check_worker(self) -> None:
        pass

    def blame_request(self) -> None:
        pass

    def restart(self, stopping: Callable[[], bool]) -> None:
        raise InferError("a model in the server's own process cannot be restarted")


Executor = LocalExecutor | Replica


class BatchRunner:
    """Runs the batches of one executor; all methods are called on the event loop.

    `beat`: clock time of the last heartbeat; `current`: items of the running batch; `sleeping`: it waits for work;
    `failure`: error after which it runs nothing any more.
    """

    def __init__(
        self,
        executor: Executor,
        number: int,
        name: str,
        collator: Collator,
        quarantine: Quarantine,
        clock: Callable[[], float],
        on_death: Callable[[], None],
    ) -> None:
        self.executor, self.number, self.name = executor, number, name
        self._collator, self._quarantine, self._clock, self._on_death = collator, quarantine, clock, on_death
        self.current: list[QueueItem] = []
        self.beat = clock()
        self.sleeping = self.stopping = False
        self.failure: BaseException | None = None
        self._calls = CallThread(f"infer-{name}-{number}")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[Any] | None = None  # for a result, or for work
        self._descriptor = -1  # of the worker, while the loop reads it
        self._calling = False  # the thread has the executor
        self._timer: asyncio.TimerHandle | None = None

    @property
    def running(self) -> int:
        """Rows of the running batch."""
        return sum([item.rows for item in self.current])

    def hangs(self, now: float, seconds: float) -> bool:
        """Return True if a batch in this process runs for longer than `seconds`; workers have a watchdog."""
        return bool(self.current) and not self.executor.watched and now - self.beat > seconds

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._watch()
        self._timer = loop.call_later(POLL_SECONDS, self._tick)

    def stop(self) -> None:
        self.stopping = True
        self.current = []
        self._unwatch()
        if self._timer is not None:
            self._timer.cancel()
        self._calls.stop()

    def join(self, seconds: float) -> bool:
        """Wait up to `seconds` for the end of the thread; return True if it has ended."""
        return self._calls.join(seconds)

    def wake(self) -> None:
        """End `sleep`, one iteration of the loop later, so that requests that arrive together run together."""
        if self.sleeping:
            self.sleeping = False
            self._settle(None)

    async def sleep(self, seconds: float | None) -> None:
        """Wait until woken, for at most `seconds`; restart a worker that dies meanwhile.

        Raises `RestartLimitError` when it fails again and again.
        """
        self.sleeping = True
        timer = None if seconds is None else self.loop.call_later(seconds, self.wake)
        try:
            await self._wait()
        except (ClosedError, WorkerLostError, WorkerSilentError, msgspec.DecodeError):
            self.sleeping = False
            try:
                await self._call(self.executor.check_worker)
            except WorkerLostError as error:
                await self._restart(error)
        finally:
            self.sleeping = False
            if timer is not None:
                timer.cancel()

    async def execute(self, taken: NextBatch) -> BatchResult:
        """Run a batch; if that fails, run its parts, so that only a bad request fails.

        Raises `RestartLimitError` when the worker fails again and again.
        """
        self.current = taken.items
        batch = BatchResult(taken.items, [], self._clock(), taken.reason)
        try:
            batch.outcomes = list(await self._run(batch.items, batch))
        except Exception as error:  # noqa: BLE001 - a model may raise anything
            batch.items = [part for item in batch.items for part in item.split()]
            batch.outcomes = await self._outcomes_after(error, batch.items, batch)
        batch.worker, batch.began = self.executor.pid, self.executor.began
        self.current = []
        return batch

    async def _outcomes(self, items: Sequence[QueueItem], batch: BatchResult) -> list[Outcome]:
        try:
            return list(await self._run(items, batch))
        except Exception as error:  # noqa: BLE001 - a model may raise anything; each request gets its own reason
            return await self._outcomes_after(error, items, batch)

    async def _outcomes_after(
        self, error: Exception, items: Sequence[QueueItem], batch: BatchResult
    ) -> list[Outcome]:
        """Run items again after an error: all if the worker was dead before, each after a crash, else each half."""
        if isinstance(error, MessageNotSentError):
            await self._restart(error)
            if self.stopping:
                raise WorkerDiedError("the model's process died") from error
            return await self._outcomes(items, batch)
        if isinstance(error, WorkerLostError):
            batch.reason = "retry"
            if len(items) == 1 and items[0].deaths:
                self.executor.blame_request()
            await self._restart(error)
            return [await self._retry(item, batch) for item in items]
        if len(items) == 1:
            return [error]
        batch.reason, half = "retry", len(items) // 2
        return await self._outcomes(items[:half], batch) + await self._outcomes(items[half:], batch)

    async def _retry(self, item: QueueItem, batch: BatchResult) -> Outcome:
        """Run an item again, alone, after a worker crash; quarantine it if the worker crashes again."""
        item.deaths += 1
        if item.deaths > 1:
            self._quarantine.add(digest_of(item.inputs))
            return PoisonError("the model's process crashed on this request twice")
        if item.deadline <= self._clock():
            return DeadlineError(
                "the time of the request ran out while the model's process was started again"
            )
        if self.stopping or item.owner.settled:
            return WorkerDiedError("the model's process died")
        return (await self._outcomes([item], batch))[0]

    async def _run(self, items: Sequence[QueueItem], batch: BatchResult) -> list[Arrays]:
        executor = self.executor
        if isinstance(executor, LocalExecutor):
            outputs, batch.compute = await self._call(self._run_here, executor, items, batch)
        else:
            outputs, batch.compute = await self._run_in_worker(executor, items, batch)
        computed = self._clock()
        results = self._collator.split_outputs(outputs, [item.sizes for item in items])
        batch.cut = self._clock() - computed
        return results

    def _run_here(
        self, executor: LocalExecutor, items: Sequence[QueueItem], batch: BatchResult
    ) -> tuple[Arrays, float]:
        inputs = self._collate(items, batch)
        try:
            return executor.run(inputs)
        finally:
            inputs.clear()  # an error's traceback would keep them

    async def _run_in_worker(
        self, executor: Replica, items: Sequence[QueueItem], batch: BatchResult
    ) -> tuple[Arrays, float]:
        try:
            if sum([item.size_bytes for item in items]) > SMALL_BATCH:
                await self._call(self._send, executor, items, batch)
            else:
                self._send(executor, items, batch)
        except (ClosedError, WorkerLostError) as error:
            raise await self._call(executor.not_sent) from error
        try:
            result: tuple[Arrays, float] = await self._wait()
        except (ClosedError, WorkerLostError, WorkerSilentError, msgspec.DecodeError):
            return await self._call(executor.finish)  # which raises what became of the worker
        return result

    def _send(self, executor: Replica, items: Sequence[QueueItem], batch: BatchResult) -> None:
        inputs = self._collate(items, batch)
        try:
            executor.begin(inputs)
        finally:
            inputs.clear()

    def _collate(self, items: Sequence[QueueItem], batch: BatchResult) -> Arrays:
        began = self._clock()
        try:
            inputs, batch.padding = self._collator.collate([item.inputs for item in items], self.executor.new)
        except BaseException:
            self.executor.abandon()
            raise
        batch.assemble = self._clock() - began
        return inputs

    async def _restart(self, error: WorkerLostError) -> None:
        """Restart the executor's worker. Raises `RestartLimitError` when it fails again and again."""
        if not self.stopping:
            log.error("a worker of %s died: %s", self.name, error)
            self._on_death()
            await self._call(self.executor.restart, lambda: self.stopping)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise RuntimeError("this runner of batches was not started")
        return self._loop

    async def _wait(self) -> Any:
        """Wait for `wake`, or for the worker's result or end."""
        waiter = self._waiter = self.loop.create_future()
        try:
            return await waiter
        finally:
            self._waiter = None
            del waiter  # its error's traceback refers to this frame

    def _settle(self, result: object, error: Exception | None = None) -> None:
        if self._waiter is None or self._waiter.done():
            return
        if error is None:
            self._waiter.set_result(result)
        else:
            self._waiter.set_exception(error)

    def _poll(self) -> None:
        """Read the worker's messages; the end of its process stays readable until somebody waits."""
        if isinstance(self.executor, LocalExecutor) or self._calling:
            return
        try:
            result = self.executor.poll()
        except Exception as error:  # noqa: BLE001 - of the worker or its model, for whoever waits
            self._settle(None, error)
        else:
            if result is not None:
                self._settle(result)

    def _tick(self) -> None:
        """Poll the worker: one that hangs makes no descriptor readable."""
        self._timer = self.loop.call_later(POLL_SECONDS, self._tick)
        if not self.current:
            self.beat = self._clock()
        self._poll()

    def _watch(self) -> None:
        self._descriptor = self.executor.fileno()
        if self._descriptor >= 0:
            self.loop.add_reader(self._descriptor, self._poll)

    def _unwatch(self) -> None:
        if self._descriptor >= 0:
            self.loop.remove_reader(self._descriptor)
            self._descriptor = -1

    async def _call(self, function: Callable[..., R], *arguments: object) -> R:
        """Make a call in the thread. Meanwhile the loop does not read the worker, whose process the call may end."""
        self._unwatch()
        self._calling = True
        try:
            return await self._calls.run(self.loop, function, *arguments)
        finally:
            self._calling = False
            if not self.stopping:
                self._watch()


class CallThread:
    """Daemon thread that makes one call after another; started by the first.

    It lives until `stop`: Linux ends a worker process with the thread that started it.
    """

    def __init__(self, name: str) -> None:
        self._calls = queue.SimpleQueue[Call | None]()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    async def run(self, loop: asyncio.AbstractEventLoop, function: Callable[..., R], *arguments: object) -> R:
        """Return what the function returns, or raise what it raises."""
        done: asyncio.Future[tuple[R, BaseException | None]] = loop.create_future()
        self._calls.put((loop, done, function, arguments))
        if self._thread.ident is None:
            self._thread.start()
        result, error = await done
        try:
            if error is not None:
                raise error
            return result
        finally:
            del result, error, done, arguments  # the error's traceback refers to this frame

    def stop(self) -> None:
        """End the thread after the calls that it was given."""
        self._calls.put(None)

    def join(self, seconds: float) -> bool:
        """Wait up to `seconds` for the end of the thread; return True if it has ended."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            _make(*call)
            del call


def _make(
    loop: asyncio.AbstractEventLoop,
    done: asyncio.Future[Any],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    result, error = None, None
    try:
        result = function(*arguments)
    except BaseException as raised:  # noqa: BLE001 - raised where the call is awaited
        error = raised
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(_settle, done, result, error)
    del result, error, done, arguments  # the error's traceback refers to this frame


def _settle(done: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if not done.done():
        done.set_result((result, error))
