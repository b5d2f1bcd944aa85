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
from .batch_result import Ran, count_batch
from .collate import BATCH, Layout
from .executor import Local
from .executor_pool import Lanes
from .fair_queue import FairBatcher
from .queue import Batcher
from .queue_items import Entry
from .results import Answer, Awaited, Hop, Queued
from .run_arrays import Arrays

if TYPE_CHECKING:
    from .executor_thread import Lane

NORMAL = 2  # priority of a request that names none; smaller goes first


class Engine:
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
        self.layout = Layout(predictor, limits.max_batch)
        executors = getattr(predictor, "executors", None) or [Local(predictor, clock)]
        self.batcher = (FairBatcher if fair else Batcher)(
            self.layout.max_batch, limits, clock, len(executors)
        )
        self.quarantine = Quarantine()
        self.lock, self.stopping = threading.Lock(), False
        self.lanes = Lanes(self, executors)
        self._home: asyncio.AbstractEventLoop | None = None
        self.batcher.speed.seed(getattr(predictor, "speeds", ()))
        self.texts = texts_of_encoder(predictor)

    def start(self, home: asyncio.AbstractEventLoop) -> None:
        """Answers go to `home`; call once."""
        self._home = home
        self.lanes.start()
        if self.texts is not None:
            self.texts.start()

    async def infer(
        self, arrays: Arrays, *, timeout: float, priority: int = NORMAL, tenant: str = ""
    ) -> Answer:
        """Raises `InputError`, `OverloadedError`, `DeadlineError` after `timeout` seconds, or the model's.
        Cancelling the caller takes the request out of the queue."""
        home = asyncio.get_running_loop()
        ticket = Awaited(home.create_future())
        try:
            self._submit(ticket, arrays, self.clock() + timeout, priority, tenant)
            alarm = home.call_later(timeout, self.expire, ticket)
            try:
                return await ticket.future
            except asyncio.CancelledError:
                self.withdraw(ticket)
                raise
            finally:
                alarm.cancel()
        finally:
            ticket.entries, ticket.done = [], {}  # those refer back, and hold arrays, also of shared memory
            del ticket  # as the traceback of what its future raised does

    def knock(self, *, timeout: float, priority: int = NORMAL, tenant: str = "") -> None:
        """Raises `OverloadedError` or `NotReadyError` where even the smallest request would be refused now, so that
        nobody reads a larger one for nothing."""
        with self.lock, self._counting():
            self.batcher.door_of(tenant).check(priority, self.clock() + timeout)

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        try:
            yield
        except InferError as error:
            self.metrics.rejected("overloaded" if isinstance(error, OverloadedError) else error.code)
            raise

    @property
    def home(self) -> asyncio.AbstractEventLoop:
        """Where answers go, once it is started. Raises `InferError` before."""
        if self._home is None:
            raise InferError("the engine is not started")
        return self._home

    @property
    def waiting(self) -> int:
        return self.batcher.requests

    def warmup(self) -> None:
        """So that the first request pays for nothing, and none waits for more than it knows. To be called before
        `start`."""
        self.batcher.speed.seed(self.predictor.warmup() or ())

    @property
    def running(self) -> int:
        """Rows of the batches that run."""
        return self.lanes.running

    @property
    def beat(self) -> float:
        """When the lane that is longest away last looked."""
        return self.lanes.beat

    @property
    def failure(self) -> BaseException | None:
        return self.lanes.failure

    @property
    def healthy(self) -> bool:
        """The threads live, and no batch in this process is stuck; workers are watched by their lanes."""
        return self.lanes.alive(self.clock(), self.limits.wedged_seconds)

    @property
    def ready(self) -> bool:
        """A request would be run now: one lane at least can."""
        return self.healthy and self.lanes.answering

    @property
    def idle(self) -> bool:
        return not self.running and not self.batcher.requests

    def drain(self) -> None:
        """Admit nothing more; what is queued still runs."""
        with self.lock:
            self.batcher.draining = True
        self.lanes.ring()

    def stop(self, error: InferError) -> None:
        """Fail what is queued and what runs, and end the threads. To be called on the loop's thread."""
        with self.lock:
            self.stopping = self.batcher.draining = True
            entries = [*self.batcher.clear(), *(entry for lane in self.lanes for entry in lane.current)]
        self.lanes.stop()
        if self.texts is not None:
            self.texts.close()
        for entry in entries:
            entry.ticket.fail(error)

    def join(self, seconds: float) -> None:
        self.lanes.join(seconds)

    def _submit(self, ticket: Queued, arrays: Arrays, deadline: float, priority: int, tenant: str) -> None:
        sizes, key, rows, elements, _ = self.layout.piece(arrays)
        for index, part in enumerate(self.layout.split(arrays, rows)):
            own = {**sizes, BATCH: len(next(iter(part.values())))} if self.layout.batched else sizes
            size = sum(array.nbytes for array in part.values())
            count = own[BATCH] if self.layout.batched else 1
            ticket.entries.append(
                Entry(part, own, key, count, elements, size, deadline, priority, ticket, index, tenant=tenant)
            )
        if len(self.quarantine):
            for entry in ticket.entries:
                self.quarantine.refuse(digest_of(entry.inputs))
        with self.lock, self._counting():
            self.batcher.admit(ticket.entries, deadline)
            lane = self.lanes.sleeper()
        self._wake(lane)

    def submit_together(self, entry: Entry) -> bool:
        """Queue an item of several requests, all or none; False: each is to be submitted alone, to be told why."""
        if entry.rows // entry.requests > self.batcher.max_batch or len(self.quarantine):
            return False
        with self.lock:
            entered = self.batcher.admit_together(entry, entry.deadline)
            lane = self.lanes.sleeper() if entered else None
        self._wake(lane)
        return entered

    def _wake(self, lane: Lane | None) -> None:
        if lane is not None and self._home is not None:
            # One turn of the loop later, so that all requests that came in together ring once and run together.
            self._home.call_soon(lane.look)

    def withdraw(self, ticket: Queued) -> None:
        """Nobody wants it any more."""
        ticket.settled = True
        self.metrics.cancelled("queued" if self._withdraw(ticket) else "running")

    def _withdraw(self, ticket: Queued) -> int:
        with self.lock:
            return sum([self.batcher.cancel(entry) for entry in ticket.entries])

    def expire(self, ticket: Queued, when: str = "") -> None:
        if pending := ticket.pending:
            waiting = self._withdraw(ticket)
            with self.lock:
                first = ticket.entries[0]
                for _ in range(pending):
                    self.batcher.door_of(first.tenant).late(first)
            self.metrics.deadline_exceeded.inc(pending)
            when = when or ("in the queue" if waiting else "while it ran")
            ticket.fail(DeadlineError(f"the time of the request ran out {when}"))

    def call_home(self, function: Callable[..., None], *arguments: Any) -> None:
        """On the loop's thread, soon; from any thread."""
        home = self._home
        if home is not None and not home.is_closed():
            home.call_soon_threadsafe(function, *arguments)

    def deliver(self, ran: Ran) -> None:
        """On the loop's thread: count the batch, and answer every request that is now complete."""
        count_batch(ran, self.metrics, self.layout.ragged)
        size = 1 if ran.reason == "retry" else ran.rows
        hop = None if ran.worker is None or ran.reason == "retry" else self._hop(ran, ran.worker)
        for entry, outcome in zip(ran.entries, ran.outcomes, strict=True):
            queued, ticket = ran.started - entry.arrived, entry.ticket
            if not isinstance(outcome, Exception):
                ticket.finish(entry.index, Answer(outcome, queued, ran.compute, size, hop))
                continue
            if isinstance(ticket, Queued):
                self._withdraw(ticket)
            ticket.fail(outcome)

    def _hop(self, ran: Ran, worker: int) -> Hop:
        back = self.clock() - ran.began - ran.compute
        return Hop(worker, max(ran.began - ran.started, 0.0), max(back, 0.0))
