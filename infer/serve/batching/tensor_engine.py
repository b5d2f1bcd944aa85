"""Engine of one tensor model: requests arrive on the event loop, executor threads run them in batches."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ...errors import DeadlineError, InferError, OverloadedError
from ...tasks.media_model import IMAGE_TASKS, SOUND_TASKS, MediaModel
from ..limits import ServeLimits
from ..llm.tokenizer_pool import encoder_tokenizer_pool
from ..observability.metrics import ModelMetrics
from ..workers.restart_policy import Quarantine, digest_of
from .admission import AdmissionController
from .batch_queue import BatchQueue
from .collate import Arrays, Collator
from .executor import LocalExecutor, count_batch
from .executor_pool import ExecutorPool
from .executor_thread import ExecutorThread
from .infer_result import InferResult
from .queue_items import BatchResult, FutureOwner, ItemOwner, QueueItem, queue_items
from .sequences import SequenceCall, Sequences

DEFAULT_PRIORITY = 2  # smaller goes first


class TensorEngine:
    """Queue, executors and metrics of one tensor model. `await engine.infer(arrays)` runs one request.

    `predictor` runs in this process, or has `executors` that run it in others, each with a thread of its own.
    `fair`: each tenant has a share of the queue.
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
        self.collator = Collator(predictor, limits.max_batch)
        executors = getattr(predictor, "executors", None) or [LocalExecutor(predictor, clock)]
        self.queue = BatchQueue(
            self.collator.max_batch, limits, clock, len(executors), packed=self.collator.packed
        )
        self.admission = AdmissionController(self.queue)
        self.quarantine = Quarantine()
        self.sequences = Sequences(self.collator.states, limits, clock, shared_by_tenants=fair)
        self.lock, self.stopping = threading.Lock(), False
        self.executors = ExecutorPool(self, executors)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.queue.latency.seed(getattr(predictor, "speeds", ()))
        self.texts = encoder_tokenizer_pool(predictor)
        reads_media = predictor.task in (*IMAGE_TASKS, *SOUND_TASKS)
        self.media = MediaModel.of(predictor) if reads_media else None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the threads; results go to `loop`. Call once."""
        self._loop = loop
        self.executors.start()
        if self.texts is not None:
            self.texts.start()

    async def infer(
        self, arrays: Arrays, *, timeout: float, priority: int = DEFAULT_PRIORITY, tenant: str = ""
    ) -> InferResult:
        """Run one request: named arrays of any number of rows, checked against the model's inputs.

        Raises `InputError`, `OverloadedError`, `DeadlineError` after `timeout` seconds, or the model's error.
        Cancelling the caller removes the request from the queue.
        """
        loop = asyncio.get_running_loop()
        owner = FutureOwner(loop.create_future(), self.collator.axes)
        try:
            self.submit(owner, arrays, timeout=timeout, priority=priority, tenant=tenant)
            alarm = loop.call_later(timeout, self.expire, owner)
            try:
                return await owner.future
            except asyncio.CancelledError:
                self.cancel_request(owner)
                raise
            finally:
                alarm.cancel()
        finally:
            owner.items, owner.done = [], {}  # reference cycles that hold shared memory
            del owner  # the traceback of its future's error refers to it

    async def infer_in_sequence(
        self,
        arrays: Arrays,
        call: SequenceCall,
        client: str,
        *,
        timeout: float,
        priority: int = DEFAULT_PRIORITY,
        tenant: str = "",
    ) -> InferResult:
        """Run one call of a sequence of `client`: with the state that its last call left, which this one's replaces.

        Raises as `infer` and `Sequences.turn` do; the state then stays as it was.
        """
        async with self.sequences.turn(client, call, arrays, timeout) as (inputs, keep, left):
            answer = await self.infer(inputs, timeout=left, priority=priority, tenant=tenant)
            keep(answer.outputs)
            return answer

    def check_admission(self, *, timeout: float, priority: int = DEFAULT_PRIORITY, tenant: str = "") -> None:
        """Raise `OverloadedError` or `NotReadyError` if even the smallest request would be refused now.

        Called before a body is read.
        """
        with self.lock, self._counting():
            self.admission.check(priority, self.clock() + timeout, tenant=tenant)

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        try:
            yield
        except InferError as error:
            self.metrics.rejected("overloaded" if isinstance(error, OverloadedError) else error.code)
            raise

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Event loop of the results. Raises `InferError` before `start`."""
        if self._loop is None:
            raise InferError("the engine is not started")
        return self._loop

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return self.queue.requests

    def warmup(self) -> None:
        """Run the predictor's warm-up and seed the latency model with its times. Call before `start`."""
        self.queue.latency.seed(self.predictor.warmup() or ())

    @property
    def running(self) -> int:
        """Rows of the running batches."""
        return self.executors.running

    @property
    def beat(self) -> float:
        """Oldest heartbeat of the executor threads, in clock seconds."""
        return self.executors.beat

    @property
    def failure(self) -> BaseException | None:
        """Error that ended an executor thread; None while all live."""
        return self.executors.failure

    @property
    def healthy(self) -> bool:
        """True if all threads live and no batch in this process hangs; workers have watchdogs of their own."""
        return self.executors.alive(self.clock(), self.limits.wedged_seconds)

    @property
    def ready(self) -> bool:
        """True if a request would run now on at least one executor."""
        return self.healthy and self.executors.answering

    @property
    def idle(self) -> bool:
        """True if nothing runs or waits."""
        return not self.running and not self.queue.requests

    def drain(self) -> None:
        """Admit no new request; queued ones still run."""
        with self.lock:
            self.queue.draining = True
        self.executors.wake()

    def stop(self, error: InferError) -> None:
        """Fail all queued and running requests with `error` and end the threads. Call on the event loop."""
        with self.lock:
            self.stopping = self.queue.draining = True
            items = [*self.queue.clear(), *(item for thread in self.executors for item in thread.current)]
        self.executors.stop()
        if self.texts is not None:
            self.texts.close()
        for item in items:
            item.owner.fail(error)

    def submit(self, owner: ItemOwner, arrays: Arrays, *, timeout: float, priority: int, tenant: str) -> None:
        """Queue one request, whose outcome `owner` gets; `infer` says what is raised. On the event loop."""
        deadline = self.clock() + timeout
        whole = self.collator.complete(arrays)
        owner.items += queue_items(self.collator, owner, whole, deadline, priority, tenant)
        if len(self.quarantine):
            for item in owner.items:
                self.quarantine.refuse(digest_of(item.inputs))
        with self.lock, self._counting():
            self.admission.admit(owner.items, deadline)
            self.queue.insert(owner.items)
            thread = self.executors.claim_sleeping()
        self._wake(thread)

    def submit_group(self, item: QueueItem) -> bool:
        """Queue an item of several requests, or return False: each is then submitted alone, and gets its own error."""
        if item.rows // item.requests > self.queue.max_batch or len(self.quarantine):
            return False
        with self.lock:
            if not self.admission.admit_group(item, item.deadline):
                return False
            self.queue.insert([item])
            thread = self.executors.claim_sleeping()
        self._wake(thread)
        return True

    def wake_sleeping(self) -> None:
        """Wake one sleeping executor thread, if any. The caller holds the lock."""
        if (other := self.executors.claim_sleeping()) is not None:
            other.wake()

    def _wake(self, thread: ExecutorThread | None) -> None:
        if thread is not None and self._loop is not None:
            # One loop iteration later, so that requests that arrived together wake it once and run together.
            self._loop.call_soon(thread.poll_queue)

    def cancel_request(self, owner: ItemOwner) -> None:
        """Cancel a request whose client is gone."""
        owner.settled = True
        self.metrics.cancelled("queued" if self._withdraw(owner) else "running")

    def _withdraw(self, owner: ItemOwner) -> int:
        with self.lock:
            return sum([self.queue.cancel(item) for item in owner.items])

    def expire(self, owner: ItemOwner, when: str = "") -> None:
        """Fail requests whose deadline passed. `when`: stage, for the message."""
        if pending := owner.pending:
            waiting = self._withdraw(owner)
            with self.lock:
                first = owner.items[0]
                for _ in range(pending):
                    self.admission.note_expired(first)
            self.metrics.deadline_exceeded.inc(pending)
            when = when or ("in the queue" if waiting else "while it ran")
            owner.fail(DeadlineError(f"the request's deadline passed {when}"))

    def call_on_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the event loop; from any thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(function, *arguments)

    def deliver(self, batch: BatchResult) -> None:
        """Count a batch and resolve its requests; on the event loop."""
        count_batch(batch, self.metrics, self.collator.ragged)
        size = 1 if batch.reason == "retry" else batch.rows
        transfer = None if batch.reason == "retry" else batch.transfer(self.clock())
        for item, outcome in zip(batch.items, batch.outcomes, strict=True):
            queued, owner = batch.started - item.arrived, item.owner
            if not isinstance(outcome, Exception):
                owner.finish(item.index, InferResult(outcome, queued, batch.compute, size, transfer))
                continue
            if isinstance(owner, ItemOwner):
                self._withdraw(owner)
            owner.fail(outcome)
