"""Executors, which run the batches of one model, here or in another process; the engine as their threads see it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import select
import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ...errors import InferError
from ..observability.metrics import ModelMetrics
from ..workers.restart_policy import Quarantine
from .collate import Arrays, Collator, run_arrays
from .queue_items import BatchResult, ItemOwner, NextBatch


class Executor(Protocol):
    """Runs one batch after another; see `LocalExecutor` and `workers.replica.Replica`."""

    answering: bool  # a batch would run now
    watched: bool  # a batch that hangs raises `WorkerLostError`
    pid: int | None  # of the worker process; None: this process
    began: float  # clock time at which the worker began the last batch

    def fileno(self) -> int: ...

    def new(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray: ...

    def run(self, inputs: Arrays) -> tuple[Arrays, float]: ...

    def abandon(self) -> None: ...

    def check_worker(self) -> None: ...

    def blame_request(self) -> None: ...

    def restart(self, stopping: Callable[[], bool]) -> None: ...


@runtime_checkable
class PollingExecutor(Executor, Protocol):
    """Executor with calls that do not block; see `workers.replica.Replica`."""

    def begin(self, inputs: Arrays) -> None: ...

    def finish(self) -> tuple[Arrays, float]: ...

    def poll(self) -> tuple[Arrays, float] | None: ...


class LocalExecutor:
    """Executor that calls a predictor in this process."""

    answering, watched = True, False
    pid: int | None = None
    began = 0.0

    def __init__(self, predictor: Any, clock: Callable[[], float]) -> None:
        self._predictor, self._clock = predictor, clock

    def fileno(self) -> int:
        return -1

    def new(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.empty(shape, dtype)

    def run(self, inputs: Arrays) -> tuple[Arrays, float]:
        began = self._clock()
        outputs = run_arrays(self._predictor, inputs)
        return outputs, self._clock() - began

    def abandon(self) -> None:
        pass

    def check_worker(self) -> None:
        pass

    def blame_request(self) -> None:
        pass

    def restart(self, stopping: Callable[[], bool]) -> None:
        raise InferError("a model in the server's own process cannot be restarted")


class EngineQueue(Protocol):
    """Calls of an executor thread on the queue; the engine's lock is held for each."""

    @property
    def requests(self) -> int: ...

    def take(self, executor: int = 0) -> NextBatch: ...

    def finish(self, seconds: float, executor: int = 0) -> None: ...


class EngineHandle(Protocol):
    """Calls of an executor thread on its engine."""

    predictor: Any
    clock: Callable[[], float]
    collator: Collator
    lock: threading.Lock
    metrics: ModelMetrics
    quarantine: Quarantine
    stopping: bool

    @property
    def queue(self) -> EngineQueue: ...

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    def call_on_loop(self, function: Callable[..., None], *arguments: Any) -> None: ...

    def deliver(self, batch: BatchResult) -> None: ...

    def expire(self, owner: ItemOwner, when: str = "") -> None: ...

    def stop(self, error: InferError) -> None: ...

    def wake_sleeping(self) -> None: ...


class Wakeup:
    """Event that any thread sets and one thread waits for. Several calls wake it once; none after `close`."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._lock, self._closed = threading.Lock(), False

    def notify(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):  # full: a notification is pending
            if not self._closed:
                os.write(self._write, b"!")

    def wait(self, seconds: float, other: int = -1) -> None:
        """Wait for a notification, until descriptor `other` is readable, or for `seconds`."""
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        if other >= 0:
            poll.register(other, select.POLLIN)
        poll.poll(1000 * seconds)
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self._read)
            os.close(self._write)


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
