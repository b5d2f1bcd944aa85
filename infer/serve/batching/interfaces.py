"""Protocols between the parts of batching, so that admission does not import the queue, nor an executor the engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from ..limits import ServeLimits
from .latency_model import LatencyModel
from .queue_items import HeapEntry, NextBatch

if TYPE_CHECKING:
    from ...errors import InferError
    from ..observability.metrics import ModelMetrics
    from ..workers.quarantine import Quarantine
    from .batch_result import BatchResult
    from .collate import Collator
    from .results import ItemOwner


class QueueState(Protocol):
    """State of the whole queue of one model that admission and batch formation read. Times are `clock` seconds."""

    limits: ServeLimits
    latency: LatencyModel
    max_batch: int
    num_executors: int
    draining: bool
    requests: int
    running: dict[int, tuple[int, float]]  # executor → work of its batch, start time
    finished: float  # time of the last measured batch

    @property
    def clock(self) -> Callable[[], float]: ...

    @property
    def kinds(self) -> int: ...


class WaitingState(Protocol):
    """Waiting items that one admission controller counts: those of one tenant, or all."""

    requests: int

    def ahead(self, priority: int = ..., deadline: float | None = None) -> tuple[float, float]: ...

    def full(self, requests: int, rows: int, size: int) -> str: ...


class TenantState(Protocol):
    """Waiting items of one tenant and its service counter, in seconds."""

    name: str
    served: float

    def items(self, without: Any = None) -> Iterator[HeapEntry]: ...


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
