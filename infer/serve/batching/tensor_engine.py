"""Engine of one tensor model: admits and queues requests, and runs them in batches, all on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from ...errors import DeadlineError, InferError, UsageError
from ...tasks.media_model import IMAGE_TASKS, SOUND_TASKS, MediaModel
from ..limits import ServeLimits
from ..llm.tokenizer_pool import TokenizerPool, encoder_tokenizer
from ..observability.metrics import ModelMetrics
from ..served_model import ServedModel
from ..workers.restart_policy import Quarantine, digest_of, error_for_requests
from .admission import AdmissionController
from .batch_queue import BatchQueue
from .batch_runner import BatchRunner, Executor, LocalExecutor
from .collate import Arrays, Collator
from .infer_result import InferResult
from .queue_items import BatchResult, FutureOwner, ItemOwner, QueueItem, queue_items
from .sequences import SequenceCall, Sequences

log = logging.getLogger("infer.serve")
DEFAULT_PRIORITY = 2  # smaller goes first
TOO_LATE = "in the queue, or would while it ran"


class TensorEngine:
    """Queue, executors and metrics of one tensor model. `await engine.infer(arrays)` runs one request.

    `model` runs in this process, or in its `replicas`. Each has a task on the event loop, which takes batches one after
    another. No method may be called on another thread.
    `shared_by_tenants`: see `Sequences`.
    """

    def __init__(
        self,
        model: ServedModel,
        limits: ServeLimits,
        metrics: ModelMetrics,
        clock: Callable[[], float] = time.monotonic,
        *,
        shared_by_tenants: bool = False,
    ) -> None:
        self.model, self.limits, self.metrics, self.clock = model, limits, metrics, clock
        self.info = info = model.info
        self.collator = Collator(info, limits.max_batch)
        executors: Sequence[Executor] = model.replicas or [LocalExecutor(model.run, clock)]
        self.queue = BatchQueue(
            self.collator.max_batch, limits, clock, len(executors), packed=self.collator.packed
        )
        self.admission = AdmissionController(self.queue)
        self.quarantine = Quarantine()
        self.sequences = Sequences(self.collator.states, limits, clock, shared_by_tenants=shared_by_tenants)
        self.runners = [
            BatchRunner(
                executor,
                number,
                info.name,
                self.collator,
                self.quarantine,
                clock,
                on_death=metrics.worker_deaths.inc,
            )
            for number, executor in enumerate(executors)
        ]
        self._tasks: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self.queue.latency.seed(model.speeds)
        self._texts = encoder_tokenizer(model)
        self.media = MediaModel(info) if info.task in (*IMAGE_TASKS, *SOUND_TASKS) else None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start to run batches on `loop`; call once, on its thread or before it runs."""
        self._loop = loop
        for runner in self.runners:
            runner.start(loop)
            self._tasks.append(loop.create_task(self._run_batches(runner)))
        if self._texts is not None:
            self._texts.start()

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
        with self._counting():
            self.admission.check(priority, self.clock() + timeout, tenant=tenant)

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        try:
            yield
        except InferError as error:
            self.metrics.rejected(error)
            raise

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Event loop of the results. Raises `InferError` before `start`."""
        if self._loop is None:
            raise InferError("the engine is not started")
        return self._loop

    @property
    def tokenizer(self) -> TokenizerPool:
        """Tokenizer of texts. Raises `UsageError` for a model that takes none."""
        if self._texts is None:
            raise UsageError(f"{self.info.name} takes tensors, not text")
        return self._texts

    @property
    def takes_text(self) -> bool:
        """True if the model has a tokenizer that makes all its inputs."""
        padding = self.collator.padding
        return bool(padding) and self.collator.inputs.keys() <= padding.keys()

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return self.queue.requests

    def warmup(self) -> None:
        """Run the model's warm-up and seed the latency model with its times. Call before `start`."""
        self.queue.latency.seed(self.model.warmup())

    @property
    def running(self) -> int:
        """Rows of the running batches."""
        return sum([runner.running for runner in self.runners])

    @property
    def beat(self) -> float:
        """Oldest heartbeat of the runners, in clock seconds."""
        return min(runner.beat for runner in self.runners)

    @property
    def failure(self) -> BaseException | None:
        """Error that ended a runner; None while all live."""
        return next((runner.failure for runner in self.runners if runner.failure is not None), None)

    @property
    def healthy(self) -> bool:
        """True if all runners live and no batch in this process hangs; workers have watchdogs of their own."""
        now, seconds = self.clock(), self.limits.wedged_seconds
        alive = bool(self._tasks) and not any(task.done() for task in self._tasks)
        return alive and not any(runner.hangs(now, seconds) for runner in self.runners)

    @property
    def ready(self) -> bool:
        """True if a request would run now on at least one executor."""
        return self.healthy and any(runner.executor.answering for runner in self.runners)

    @property
    def idle(self) -> bool:
        """True if nothing runs or waits."""
        return not self.running and not self.queue.requests

    def drain(self) -> None:
        """Admit no new request; queued ones still run."""
        self.queue.draining = True
        for runner in self.runners:
            runner.wake()

    def stop(self, error: InferError) -> None:
        """Fail all queued and running requests with `error` and end the runners."""
        self.queue.draining = True
        items = [*self.queue.clear(), *(item for runner in self.runners for item in runner.current)]
        for runner in self.runners:
            runner.stop()
        for task in self._tasks:
            task.cancel()
        if self._texts is not None:
            self._texts.close()
        for item in items:
            item.owner.fail(error)

    def join(self, seconds: float) -> bool:
        """Wait up to `seconds` for each thread, after `stop`; return True if all have ended."""
        ended = [runner.join(seconds) for runner in self.runners]
        return all(ended)

    def submit(self, owner: ItemOwner, arrays: Arrays, *, timeout: float, priority: int, tenant: str) -> None:
        """Queue one request, whose outcome `owner` gets; `infer` says what is raised."""
        deadline = self.clock() + timeout
        whole = self.collator.complete(arrays)
        owner.items += queue_items(self.collator, owner, whole, deadline, priority, tenant)
        if len(self.quarantine):
            for item in owner.items:
                self.quarantine.refuse(digest_of(item.inputs))
        with self._counting():
            self.admission.admit(owner.items, deadline)
        self.queue.insert(owner.items)
        self._wake()

    def submit_group(self, item: QueueItem) -> bool:
        """Queue an item of several requests, or return False: each is then submitted alone, and gets its own error."""
        if item.rows // item.requests > self.queue.max_batch or len(self.quarantine):
            return False
        if not self.admission.admit_group(item, item.deadline):
            return False
        self.queue.insert([item])
        self._wake()
        return True

    def _wake(self) -> None:
        """Wake one sleeping runner, if any."""
        for runner in self.runners:
            if runner.sleeping:
                runner.wake()
                return

    async def _run_batches(self, runner: BatchRunner) -> None:
        try:
            while True:
                await self._run_next(runner)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it was must reach health and every caller
            log.critical("the engine of %s died", self.info.name, exc_info=error)
            runner.failure = error
            self.stop(error_for_requests(error))

    async def _run_next(self, runner: BatchRunner) -> None:
        """Run the next batch, or sleep where there is none; no frame keeps its arrays while it sleeps."""
        taken = self.queue.take(runner.number)
        runner.beat = self.clock()
        if (taken.items or taken.expired) and self.queue.requests:
            self._wake()
        for item in taken.expired:
            self.expire(item.owner, TOO_LATE)
        if taken.items:
            batch = await runner.execute(taken)
            seconds = 0.0 if batch.reason == "retry" else self.clock() - batch.started
            self.queue.finish(seconds, runner.number)
            self.deliver(batch)
        elif not taken.expired:
            await runner.sleep(taken.wait)

    def cancel_request(self, owner: ItemOwner) -> None:
        """Cancel a request whose client is gone."""
        owner.settled = True
        self.metrics.cancelled("queued" if self._withdraw(owner) else "running")

    def _withdraw(self, owner: ItemOwner) -> int:
        return sum([self.queue.cancel(item) for item in owner.items])

    def expire(self, owner: ItemOwner, when: str = "") -> None:
        """Fail requests whose deadline passed. `when`: stage, for the message."""
        if pending := owner.pending:
            waiting = self._withdraw(owner)
            for _ in range(pending):
                self.admission.note_expired(owner.items[0])
            self.metrics.deadline_exceeded.inc(pending)
            when = when or ("in the queue" if waiting else "while it ran")
            owner.fail(DeadlineError(f"the request's deadline passed {when}"))

    def deliver(self, batch: BatchResult) -> None:
        """Count a batch and resolve its requests."""
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


def count_batch(batch: BatchResult, metrics: ModelMetrics, ragged: Iterable[str]) -> None:
    """Record a batch in the metrics. `ragged`: names of the sizes that vary within a batch (sequence lengths)."""
    metrics.dispatched(batch.reason)
    metrics.executed(batch.rows, batch.assemble, batch.compute, batch.cut, batch.padding)
    if ragged:
        tokens = [math.prod([item.sizes[size] for size in ragged]) * item.rows for item in batch.items]
        metrics.batch_tokens.observe(sum(tokens))
    good, waits = 0, list[tuple[float, int]]()
    for item, outcome in zip(batch.items, batch.outcomes, strict=True):
        queued = batch.started - item.arrived
        if isinstance(outcome, Exception):
            metrics.failed(queued + batch.compute)
        else:
            good += item.rows
            waits.append((queued, item.requests))
    metrics.answered(good, waits, batch.assemble, batch.compute, batch.cut)
