"""One model, one thread: batches are taken, run and handed back to the event loop, one wake-up per batch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import DeadlineError, InferError, OverloadedError
from .batching import Batcher, Entry, Taken
from .layout import BATCH, Arrays, Layout
from .limits import ServeLimits
from .metrics import ModelMetrics
from .tickets import Answer, Ticket

log = logging.getLogger("infer.serve")
NORMAL = 2  # priority of a request that names none; smaller goes first


@dataclass(slots=True)
class Ran:
    """One batch after it ran: per entry its outputs or the reason that it has none. Seconds."""

    entries: list[Entry]
    outcomes: list[Arrays | Exception]
    started: float
    reason: str
    assemble: float = 0.0
    compute: float = 0.0
    cut: float = 0.0
    padding: float = 0.0


class Engine:
    """`await engine.infer(arrays)`; arrays are named, checked here, and may hold more rows than one batch."""

    def __init__(
        self,
        predictor: Any,
        limits: ServeLimits,
        metrics: ModelMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.predictor, self.limits, self.metrics, self.clock = predictor, limits, metrics, clock
        self.layout = Layout(predictor, limits.max_batch)
        self.batcher = Batcher(self.layout.max_batch, limits, clock)
        self.failure: BaseException | None = None
        self.running, self.beat = 0, clock()
        self._current: list[Entry] = []
        self._lock, self._bell = threading.Lock(), queue.SimpleQueue[None]()
        self._stopping = self._waiting = False
        self._thread = threading.Thread(target=self._loop, name=f"infer-{predictor.name}", daemon=True)
        self._home: asyncio.AbstractEventLoop | None = None

    def start(self, home: asyncio.AbstractEventLoop) -> None:
        """Answers go to `home`; call once."""
        self._home = home
        self._thread.start()

    async def infer(self, arrays: Arrays, *, timeout: float, priority: int = NORMAL) -> Answer:
        """Raises `InputError`, `OverloadedError`, `DeadlineError` after `timeout` seconds, or the model's.
        Cancelling the caller takes the request out of the queue."""
        home = asyncio.get_running_loop()
        ticket = Ticket(home.create_future())
        self._submit(ticket, arrays, self.clock() + timeout, priority)
        alarm = home.call_later(timeout, self._expire, ticket)
        try:
            return await ticket.future
        except asyncio.CancelledError:
            waiting = self._withdraw(ticket)
            self.metrics.cancelled("queued" if waiting else "running")
            raise
        finally:
            alarm.cancel()

    @property
    def waiting(self) -> int:
        return self.batcher.requests

    def warmup(self) -> None:
        """So that the first request pays for nothing. To be called before `start`."""
        self.predictor.warmup()

    @property
    def healthy(self) -> bool:
        """The thread lives, and its current batch is not stuck."""
        stuck = self.running and self.clock() - self.beat > self.limits.wedged_seconds
        return self.failure is None and self._thread.is_alive() and not stuck

    @property
    def idle(self) -> bool:
        return not self.running and not self.batcher.requests

    def drain(self) -> None:
        """Admit nothing more; what is queued still runs."""
        with self._lock:
            self.batcher.draining = True
        self._bell.put(None)

    def stop(self, error: InferError) -> None:
        """Fail what is queued and what runs, and end the thread. To be called on the loop's thread."""
        with self._lock:
            self._stopping = self.batcher.draining = True
            entries = [*self.batcher.clear(), *self._current]
        self._bell.put(None)
        for entry in entries:
            entry.ticket.fail(error)

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def _submit(self, ticket: Ticket, arrays: Arrays, deadline: float, priority: int) -> None:
        sizes = self.layout.check(arrays)
        key, rows = self.layout.key(sizes), sizes.get(BATCH, 1) if self.layout.batched else 1
        elements = max((array.size // max(rows, 1) for array in arrays.values()), default=0)
        for index, part in enumerate(self.layout.split(arrays, rows)):
            own = {**sizes, BATCH: len(next(iter(part.values())))} if self.layout.batched else sizes
            size = sum(array.nbytes for array in part.values())
            count = own[BATCH] if self.layout.batched else 1
            ticket.entries.append(
                Entry(part, own, key, count, elements, size, deadline, priority, ticket, index)
            )
        with self._lock:
            try:
                self.batcher.admit(ticket.entries, deadline)
            except InferError as error:
                self.metrics.rejected("overloaded" if isinstance(error, OverloadedError) else error.code)
                raise
            asleep, self._waiting = self._waiting, False
        if asleep and self._home is not None:
            # One turn of the loop later, so that all requests that came in together ring once and run together.
            self._home.call_soon(self._bell.put, None)

    def _withdraw(self, ticket: Ticket) -> int:
        with self._lock:
            return sum([self.batcher.cancel(entry) for entry in ticket.entries])

    def _expire(self, ticket: Ticket) -> None:
        if not ticket.future.done():
            waiting = self._withdraw(ticket)
            self.metrics.deadline_exceeded.inc()
            where = "in the queue" if waiting else "while it ran"
            ticket.fail(DeadlineError(f"the time of the request ran out {where}"))

    def _loop(self) -> None:
        try:
            while (taken := self._next()) is not None:
                for entry in taken.expired:
                    self._call_home(self._expire, entry.ticket)
                if taken.entries:
                    self._call_home(self._deliver, self._execute(taken))
        except BaseException as error:  # noqa: BLE001 - whatever ended the thread must reach health and every caller
            log.critical("the engine of %s died", self.predictor.name, exc_info=error)
            self.failure = error
            self._call_home(self.stop, InferError("the engine died"))

    def _next(self) -> Taken | None:
        """Blocks until there is something to do; None when stopped."""
        while True:
            with self._lock:
                self.running, self._current = 0, []
                if self._stopping:
                    return None
                taken = self.batcher.take()
                self.beat = self.clock()
                self._current = taken.entries
                self.running = sum(entry.rows for entry in taken.entries)
                if taken.entries or taken.expired:
                    return taken
                self._waiting = True
            with contextlib.suppress(queue.Empty):
                self._bell.get(timeout=min(taken.wait or 1.0, 1.0))  # looks, and so beats, each second

    def _execute(self, taken: Taken) -> Ran:
        ran = Ran(taken.entries, [], self.clock(), taken.reason)
        rows = sum(entry.rows for entry in taken.entries)
        try:
            ran.outcomes = list(self._run(taken.entries, ran))
        except Exception as error:  # noqa: BLE001 - a model may raise anything; each request gets its own reason
            ran.outcomes = [error] if len(taken.entries) == 1 else self._one_by_one(taken.entries, ran)
        seconds = self.clock() - ran.started
        with self._lock:
            self.batcher.finish(rows, 0.0 if ran.reason == "retry" else seconds)
        return ran

    def _one_by_one(self, entries: list[Entry], ran: Ran) -> list[Arrays | Exception]:
        """A batch failed: alone, the bad request fails and its neighbours don't."""
        ran.reason, outcomes = "retry", list[Arrays | Exception]()
        for entry in entries:
            try:
                outcomes += self._run([entry], ran)
            except Exception as error:  # noqa: BLE001
                outcomes.append(error)
        return outcomes

    def _run(self, entries: list[Entry], ran: Ran) -> list[Arrays]:
        begin = self.clock()
        inputs, ran.padding = self.layout.join([entry.inputs for entry in entries])
        joined = self.clock()
        outputs = run_arrays(self.predictor, inputs)
        computed = self.clock()
        pieces = self.layout.cut(outputs, [entry.sizes for entry in entries])
        ran.assemble, ran.compute, ran.cut = joined - begin, computed - joined, self.clock() - computed
        return pieces

    def _call_home(self, function: Callable[..., None], argument: Any) -> None:
        home = self._home
        if home is not None and not home.is_closed():
            home.call_soon_threadsafe(function, argument)

    def _deliver(self, ran: Ran) -> None:
        """On the loop's thread: count the batch, and answer every request that is now complete."""
        rows = sum(entry.rows for entry in ran.entries)
        self.metrics.dispatched(ran.reason)
        self.metrics.executed(rows, ran.assemble, ran.compute, ran.cut, ran.padding)
        for entry, outcome in zip(ran.entries, ran.outcomes, strict=True):
            queued = ran.started - entry.arrived
            if isinstance(outcome, Exception):
                self.metrics.failed(queued + ran.compute)
                self._withdraw(entry.ticket)
                entry.ticket.fail(outcome)
                continue
            self.metrics.answered(entry.rows, queued, ran.assemble, ran.compute, ran.cut)
            size = 1 if ran.reason == "retry" else rows
            entry.ticket.finish(entry.index, Answer(outcome, queued, ran.compute, size))


def run_arrays(predictor: Any, arrays: Mapping[str, np.ndarray]) -> Arrays:
    """`predictor.predict`, with bfloat16 carried as uint16 arrays here and as torch tensors there."""
    if not any(spec.dtype == "bfloat16" for spec in (*predictor.inputs, *predictor.outputs)):
        return predictor.predict(dict(arrays))
    import torch

    given: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    for spec in predictor.inputs:
        if spec.dtype == "bfloat16":
            given[spec.name] = given[spec.name].view(torch.bfloat16)
    outputs = predictor.predict(given)
    for name, value in outputs.items():
        outputs[name] = (value.view(torch.uint16) if value.dtype == torch.bfloat16 else value).numpy()
    return outputs
