"""Thread that takes batches, runs them on one executor and returns them: one wake-up of the event loop per batch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from ...errors import DeadlineError, PoisonError, WorkerDiedError
from ..workers.restart_policy import MessageNotSentError, WorkerLostError, digest_of, error_for_requests
from .collate import Arrays
from .executor import EngineHandle, Executor, Wakeup
from .queue_items import BatchResult, NextBatch, Outcome, QueueItem

log = logging.getLogger("infer.serve")
POLL_SECONDS = 1.0
TOO_LATE = "in the queue, or would while it ran"


FirstRun = Callable[[Sequence[QueueItem], BatchResult], list[Arrays]]


class ExecutorThread:
    """Runs the batches of one executor.

    `beat`: clock time of the last heartbeat; `running`: rows of its batch; `failure`: error that ended the thread.
    """

    def __init__(self, engine: EngineHandle, executor: Executor, number: int) -> None:
        self.engine, self.executor, self.number = engine, executor, number
        self.current: list[QueueItem] = []
        self.running, self.beat = 0, engine.clock()
        self.sleeping = False
        self.failure: BaseException | None = None
        self._wakeup: Wakeup | None = None
        name = f"infer-{engine.predictor.name}-{number}"
        self.thread = threading.Thread(target=self._loop, name=name, daemon=True)

    @property
    def unmonitored(self) -> bool:
        """True if the executor has no watchdog, so that health checks must detect a batch that hangs."""
        return not self.executor.watched

    def start(self) -> None:
        self._wakeup = Wakeup()
        self.thread.start()

    def wake(self) -> None:
        """Poll the queue now; from any thread."""
        if self._wakeup is not None:
            self._wakeup.notify()

    def poll_queue(self) -> None:
        """Poll the queue now; on the event loop."""
        self.wake()

    def stop(self) -> None:
        """End the thread, as the engine stops; on the event loop."""
        self.wake()

    def _loop(self) -> None:
        engine = self.engine
        try:
            while (taken := self._next_batch()) is not None:
                for item in taken.expired:
                    engine.call_on_loop(engine.expire, item.owner, TOO_LATE)
                if taken.items:
                    engine.call_on_loop(engine.deliver, self._execute(taken))
        except BaseException as error:  # noqa: BLE001 - whatever ended the thread must reach health and every caller
            self._fail(error)
        finally:
            if self._wakeup is not None:
                self._wakeup.close()

    def _fail(self, error: BaseException) -> None:
        engine = self.engine
        log.critical("the engine of %s died", engine.predictor.name, exc_info=error)
        self.failure = error
        engine.call_on_loop(engine.stop, error_for_requests(error))

    def _next_batch(self) -> NextBatch | None:
        """Block until there is a batch or an expired item; None when stopped."""
        engine = self.engine
        while True:
            with engine.lock:
                if engine.stopping:
                    self.running, self.current = 0, []
                    return None
                taken = self._take_batch()
                if taken.items or taken.expired:
                    return taken
                self.sleeping = True
            self._sleep(min(taken.wait or POLL_SECONDS, POLL_SECONDS))

    def _take_batch(self) -> NextBatch:
        """Take the next batch, and wake a sleeping thread for the rest. The caller holds the engine's lock."""
        engine = self.engine
        taken = engine.queue.take(self.number)
        self.beat = engine.clock()
        self.current = taken.items
        self.running = sum([item.rows for item in taken.items])
        if taken.items or taken.expired:
            self.sleeping = False
            if engine.queue.requests:
                engine.wake_sleeping()
        return taken

    def _sleep(self, seconds: float) -> None:
        """Sleep until woken, until the worker sends something, or for `seconds`."""
        if self._wakeup is not None:
            self._wakeup.wait(seconds, self.executor.fileno())
        self.sleeping = False
        self._check_worker()

    def _check_worker(self) -> None:
        try:
            self.executor.check_worker()
        except WorkerLostError as error:
            self._restart(error)

    def _restart(self, error: WorkerLostError) -> None:
        """Restart the executor's worker. Raises `HopelessError` when it fails again and again."""
        engine = self.engine
        if not engine.stopping:
            log.error("a worker of %s died: %s", engine.predictor.name, error)
            engine.call_on_loop(engine.metrics.worker_deaths.inc)
            self.executor.restart(lambda: engine.stopping)

    def _execute(self, taken: NextBatch) -> BatchResult:
        return self._complete(BatchResult(taken.items, [], self.engine.clock(), taken.reason))

    def _complete(self, batch: BatchResult, first: FirstRun | None = None) -> BatchResult:
        try:
            batch.outcomes = list((first or self._run)(batch.items, batch))
        except Exception as error:  # noqa: BLE001 - a model may raise anything
            batch.items = [one for item in batch.items for one in item.split()]
            batch.outcomes = self._outcomes(batch.items, batch, partial(raise_error, error))
        self._count_run(batch)
        return batch

    def _count_run(self, batch: BatchResult) -> None:
        engine = self.engine
        seconds = engine.clock() - batch.started
        batch.worker, batch.began = self.executor.pid, self.executor.began
        with engine.lock:
            engine.queue.finish(0.0 if batch.reason == "retry" else seconds, self.number)

    def _outcomes(
        self, items: Sequence[QueueItem], batch: BatchResult, first: FirstRun | None = None
    ) -> list[Outcome]:
        """Run items together; if that fails, run each half, so that only the bad request fails.

        `first`: replaces the first run.
        """
        try:
            return list((first or self._run)(items, batch))
        except MessageNotSentError as error:
            self._restart(error)
            if self.engine.stopping:
                raise WorkerDiedError("the model's process died") from error
            return self._outcomes(items, batch)
        except WorkerLostError as error:
            batch.reason = "retry"
            if len(items) == 1 and items[0].deaths:
                self.executor.blame_request()
            self._restart(error)
            return [self._retry(item, batch) for item in items]
        except Exception as error:  # noqa: BLE001 - a model may raise anything; each request gets its own reason
            if len(items) == 1:
                return [error]
            batch.reason, half = "retry", len(items) // 2
            return self._outcomes(items[:half], batch) + self._outcomes(items[half:], batch)

    def _retry(self, item: QueueItem, batch: BatchResult) -> Outcome:
        """Run an item again, alone, after a worker crash; quarantine it if the worker crashes again."""
        engine = self.engine
        item.deaths += 1
        if item.deaths > 1:
            engine.quarantine.add(digest_of(item.inputs))
            return PoisonError("the model's process crashed on this request twice")
        if item.deadline <= engine.clock():
            return DeadlineError(
                "the time of the request ran out while the model's process was started again"
            )
        if engine.stopping or item.owner.settled:
            return WorkerDiedError("the model's process died")
        return self._outcomes([item], batch)[0]

    def _run(self, items: Sequence[QueueItem], batch: BatchResult) -> list[Arrays]:
        inputs = self._collate(items, batch)
        try:
            outputs, batch.compute = self.executor.run(inputs)
        finally:
            inputs.clear()  # an error's traceback would keep them
        return self._split_outputs(outputs, items, batch)

    def _collate(self, items: Sequence[QueueItem], batch: BatchResult) -> Arrays:
        began = self.engine.clock()
        try:
            inputs, batch.padding = self.engine.collator.collate(
                [item.inputs for item in items], self.executor.new
            )
        except BaseException:
            self.executor.abandon()
            raise
        batch.assemble = self.engine.clock() - began
        return inputs

    def _split_outputs(self, outputs: Arrays, items: Sequence[QueueItem], batch: BatchResult) -> list[Arrays]:
        computed = self.engine.clock()
        results = self.engine.collator.split_outputs(outputs, [item.sizes for item in items])
        batch.cut = self.engine.clock() - computed
        return results


def raise_error(error: Exception, items: Sequence[QueueItem], batch: BatchResult) -> list[Arrays]:
    """Raise the error of a run that failed before, as the outcome of `FirstRun`."""
    raise error
