"""One served model of tensors: requests come in on the event loop, lanes run them in batches."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ...errors import DeadlineError, InferError, OverloadedError
from ..limits import ServeLimits
from ..llm.tokenizer_pool import texts_of_encoder
from ..observability.metrics import ModelMetrics
from ..workers.quarantine import Quarantine, digest_of
from .batch_result import BatchResult, count_batch
from .collate import BATCH, Collator
from .executor import LocalExecutor
from .executor_pool import ExecutorPool
from .fair_queue import FairBatchQueue
from .queue import BatchQueue
from .queue_items import QueueItem
from .results import AwaitedResult, InferResult, ItemOwner, WorkerTransfer
from .run_arrays import Arrays

if TYPE_CHECKING:
    from .executor_thread import ExecutorThread

DEFAULT_PRIORITY = 2  # priority of a request that names none; smaller goes first


class TensorEngine:
    """`await engine.infer(arrays)`; arrays are named, checked here, and may hold more rows than one batch.

    `predictor` runs in this process, or has `executors` that run it in others, each with a lane of its own.
    `fair`: tenants have shares of the queue; else all requests are of one.
    """

    def __init__(
        self,
        predictor: Any,
        limits: ServeLimits,
        metrics: ModelMetrics,
        clock: Callable[[], float] = time.monotonic,
        *,
        fair: bool = False,
    ) -> None:
        self.predictor, self.limits, self.metrics, self.clock = predictor, limits, metrics, clock
        self.layout = Collator(predictor, limits.max_batch)
        executors = getattr(predictor, "executors", None) or [LocalExecutor(predictor, clock)]
        self.queue = (FairBatchQueue if fair else BatchQueue)(
            self.layout.max_batch, limits, clock, len(executors)
        )
        self.quarantine = Quarantine()
        self.lock, self.stopping = threading.Lock(), False
        self.executors = ExecutorPool(self, executors)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.queue.latency.seed(getattr(predictor, "speeds", ()))
        self.texts = texts_of_encoder(predictor)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Answers go to `loop`; call once."""
        self._loop = loop
        self.executors.start()
        if self.texts is not None:
            self.texts.start()

    async def infer(
        self, arrays: Arrays, *, timeout: float, priority: int = DEFAULT_PRIORITY, tenant: str = ""
    ) -> InferResult:
        """Raises `InputError`, `OverloadedError`, `DeadlineError` after `timeout` seconds, or the model's.
        Cancelling the caller takes the request out of the queue."""
        loop = asyncio.get_running_loop()
        owner = AwaitedResult(loop.create_future())
        try:
            self._submit(owner, arrays, self.clock() + timeout, priority, tenant)
            alarm = loop.call_later(timeout, self.expire, owner)
            try:
                return await owner.future
            except asyncio.CancelledError:
                self.cancel_request(owner)
                raise
            finally:
                alarm.cancel()
        finally:
            owner.items, owner.done = [], {}  # those refer back, and hold arrays, also of shared memory
            del owner  # as the traceback of what its future raised does

    def check_admission(self, *, timeout: float, priority: int = DEFAULT_PRIORITY, tenant: str = "") -> None:
        """Raises `OverloadedError` or `NotReadyError` where even the smallest request would be refused now, so that
        nobody reads a larger one for nothing."""
        with self.lock, self._counting():
            self.queue.admission_for(tenant).check(priority, self.clock() + timeout)

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        try:
            yield
        except InferError as error:
            self.metrics.rejected("overloaded" if isinstance(error, OverloadedError) else error.code)
            raise

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Where answers go, once it is started. Raises `InferError` before."""
        if self._loop is None:
            raise InferError("the engine is not started")
        return self._loop

    @property
    def waiting(self) -> int:
        return self.queue.requests

    def warmup(self) -> None:
        """So that the first request pays for nothing, and none waits for more than it knows. To be called before
        `start`."""
        self.queue.latency.seed(self.predictor.warmup() or ())

    @property
    def running(self) -> int:
        """Rows of the batches that run."""
        return self.executors.running

    @property
    def beat(self) -> float:
        """When the lane that is longest away last looked."""
        return self.executors.beat

    @property
    def failure(self) -> BaseException | None:
        return self.executors.failure

    @property
    def healthy(self) -> bool:
        """The threads live, and no batch in this process is stuck; workers are watched by their lanes."""
        return self.executors.alive(self.clock(), self.limits.wedged_seconds)

    @property
    def ready(self) -> bool:
        """A request would be run now: one lane at least can."""
        return self.healthy and self.executors.answering

    @property
    def idle(self) -> bool:
        return not self.running and not self.queue.requests

    def drain(self) -> None:
        """Admit nothing more; what is queued still runs."""
        with self.lock:
            self.queue.draining = True
        self.executors.ring()

    def stop(self, error: InferError) -> None:
        """Fail what is queued and what runs, and end the threads. To be called on the loop's thread."""
        with self.lock:
            self.stopping = self.queue.draining = True
            items = [*self.queue.clear(), *(item for thread in self.executors for item in thread.current)]
        self.executors.stop()
        if self.texts is not None:
            self.texts.close()
        for item in items:
            item.owner.fail(error)

    def join(self, seconds: float) -> None:
        self.executors.join(seconds)

    def _submit(self, owner: ItemOwner, arrays: Arrays, deadline: float, priority: int, tenant: str) -> None:
        sizes, key, rows, elements, _ = self.layout.piece(arrays)
        for index, part in enumerate(self.layout.split(arrays, rows)):
            own = {**sizes, BATCH: len(next(iter(part.values())))} if self.layout.batched else sizes
            size = sum(array.nbytes for array in part.values())
            count = own[BATCH] if self.layout.batched else 1
            owner.items.append(
                QueueItem(
                    part, own, key, count, elements, size, deadline, priority, owner, index, tenant=tenant
                )
            )
        if len(self.quarantine):
            for item in owner.items:
                self.quarantine.refuse(digest_of(item.inputs))
        with self.lock, self._counting():
            self.queue.admit(owner.items, deadline)
            thread = self.executors.claim_sleeping()
        self._wake(thread)

    def submit_group(self, item: QueueItem) -> bool:
        """Queue an item of several requests, all or none; False: each is to be submitted alone, to be told why."""
        if item.rows // item.requests > self.queue.max_batch or len(self.quarantine):
            return False
        with self.lock:
            entered = self.queue.admit_group(item, item.deadline)
            thread = self.executors.claim_sleeping() if entered else None
        self._wake(thread)
        return entered

    def _wake(self, thread: ExecutorThread | None) -> None:
        if thread is not None and self._loop is not None:
            # One turn of the loop later, so that all requests that came in together ring once and run together.
            self._loop.call_soon(thread.look)

    def cancel_request(self, owner: ItemOwner) -> None:
        """Nobody wants it any more."""
        owner.settled = True
        self.metrics.cancelled("queued" if self._withdraw(owner) else "running")

    def _withdraw(self, owner: ItemOwner) -> int:
        with self.lock:
            return sum([self.queue.cancel(item) for item in owner.items])

    def expire(self, owner: ItemOwner, when: str = "") -> None:
        if pending := owner.pending:
            waiting = self._withdraw(owner)
            with self.lock:
                first = owner.items[0]
                for _ in range(pending):
                    self.queue.admission_for(first.tenant).late(first)
            self.metrics.deadline_exceeded.inc(pending)
            when = when or ("in the queue" if waiting else "while it ran")
            owner.fail(DeadlineError(f"the time of the request ran out {when}"))

    def call_on_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        """On the loop's thread, soon; from any thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(function, *arguments)

    def deliver(self, batch: BatchResult) -> None:
        """On the loop's thread: count the batch, and answer every request that is now complete."""
        count_batch(batch, self.metrics, self.layout.ragged)
        size = 1 if batch.reason == "retry" else batch.rows
        hop = None if batch.worker is None or batch.reason == "retry" else self._hop(batch, batch.worker)
        for item, outcome in zip(batch.items, batch.outcomes, strict=True):
            queued, owner = batch.started - item.arrived, item.owner
            if not isinstance(outcome, Exception):
                owner.finish(item.index, InferResult(outcome, queued, batch.compute, size, hop))
                continue
            if isinstance(owner, ItemOwner):
                self._withdraw(owner)
            owner.fail(outcome)

    def _hop(self, batch: BatchResult, worker: int) -> WorkerTransfer:
        back = self.clock() - batch.began - batch.compute
        return WorkerTransfer(worker, max(batch.began - batch.started, 0.0), max(back, 0.0))
