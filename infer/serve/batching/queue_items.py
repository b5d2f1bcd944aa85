"""Items of a batch queue, the batches that they run in, and the results that their owners wait for."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...errors import InferError, ResourceError
from .collate import Arrays

LOWEST_PRIORITY = 255
Urgency = tuple[float, float]  # priority, deadline; the least goes first
HeapEntry = tuple[float, float, int, "QueueItem"]  # urgency, order of arrival, item
Outcome = Arrays | Exception


@dataclass(slots=True, eq=False)
class QueueItem:
    """Rows that run in one batch: one request, or a part of it.

    A subclass may hold `requests` whole requests of equally many rows, in order, and divide them. `elements`: of one
    row of its largest input. `deadline`, `arrived`: clock seconds. `owner`: an `ItemOwner` that gets the result.
    `index`: number among the items of its owner. `row_work`: mean work of its rows, 0: `elements`.
    """

    inputs: dict[str, Any]
    sizes: dict[str, int]
    key: Hashable
    rows: int
    elements: int
    size_bytes: int
    deadline: float
    priority: int
    owner: Any
    index: int
    arrived: float = 0.0
    waiting: bool = False
    deaths: int = 0  # worker crashes while it ran
    requests: int = 1
    tenant: str = ""  # API key whose share of the queue it uses
    row_work: float = 0.0

    @property
    def work_per_row(self) -> float:
        """Work of one row as `LatencyModel` counts it: elements with padding, or real tokens."""
        return self.row_work or max(self.elements, 1)

    @property
    def work(self) -> float:
        """Work of all its rows."""
        return self.rows * self.work_per_row

    @property
    def work_per_request(self) -> float:
        """Work of one of its requests."""
        return self.rows // self.requests * self.work_per_row

    def take(self, count: int) -> QueueItem:
        """Split off its first `count` requests; only an item of several has any to give."""
        raise InferError(f"{count} requests were to be split off an item of one")

    def drop(self, at: int) -> None:
        """Remove request number `at` of several."""
        raise InferError(f"request {at} was to be removed from an item of one")

    def split(self) -> list[QueueItem]:
        """Return one item for each of its requests, each with its own owner."""
        return [self]


@dataclass(slots=True)
class NextBatch:
    """Result of one look into the queue.

    `items`: batch to run, for `reason`; `expired`: items that cannot meet their deadline any more; `wait`: seconds
    until the next look, None if there is no batch to wait for.
    """

    items: list[QueueItem] = field(default_factory=list)
    expired: list[QueueItem] = field(default_factory=list)
    reason: str = ""
    wait: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerTransfer:
    """Time between server and worker process, in seconds: `there` for the inputs, `back` for the outputs."""

    pid: int
    there: float
    back: float


@dataclass(slots=True)
class BatchResult:
    """Outputs or error of each item of a batch, and its times in seconds.

    `started`, `began`: clock times at which the batch was taken, and its worker began; `worker`: process id,
    None for this process; `padding`: share of its elements.
    """

    items: list[QueueItem]
    outcomes: list[Outcome]
    started: float
    reason: str
    assemble: float = 0.0
    compute: float = 0.0
    cut: float = 0.0
    padding: float = 0.0
    worker: int | None = None
    began: float = 0.0

    @property
    def rows(self) -> int:
        return sum([item.rows for item in self.items])

    def transfer(self, now: float) -> WorkerTransfer | None:
        """Return the time to and from the worker, for outputs that are here `now`; None if it ran in this process."""
        if self.worker is None:
            return None
        back = now - self.began - self.compute
        return WorkerTransfer(self.worker, max(self.began - self.started, 0.0), max(back, 0.0))


@dataclass(frozen=True, slots=True)
class InferResult:
    """Named outputs of one request, and its times.

    `batch_size`: rows of the batch it ran in; `transfer`: None if the model ran in this process, or in several batches.
    """

    outputs: Arrays
    queue_seconds: float
    compute_seconds: float
    batch_size: int
    transfer: WorkerTransfer | None = None

    def timings(self) -> dict[str, Any]:
        """Return the times for logs and traces, by names that end in their unit."""
        times: dict[str, Any] = {
            "queue_ms": round(1000 * self.queue_seconds, 3),
            "compute_ms": round(1000 * self.compute_seconds, 3),
            "batch": self.batch_size,
        }
        if (transfer := self.transfer) is not None:
            there, back = round(1000 * transfer.there, 3), round(1000 * transfer.back, 3)
            times |= {"worker": transfer.pid, "there_ms": there, "back_ms": back}
        return times


class PendingResult(ABC):
    """Receiver of one result or error. `settled`: it has one, or was cancelled."""

    __slots__ = ("settled",)

    def __init__(self) -> None:
        self.settled = False

    @abstractmethod
    def resolve(self, outcome: InferResult | Exception) -> None:
        """Take the outcome; called once, on the event loop."""

    def fail(self, error: Exception) -> None:
        """Resolve with an error, unless it is settled."""
        if self.settled:
            return
        self.settled = True
        self.resolve(
            ResourceError("out of memory for this request") if isinstance(error, MemoryError) else error
        )

    def finish(self, index: int, answer: InferResult) -> None:
        """Take the result of item number `index`; resolve when it is the last one."""
        if not self.settled:
            self.settled = True
            self.resolve(answer)


class ItemOwner(PendingResult):
    """Receiver that owns queue items."""

    __slots__ = ("items",)

    def __init__(self) -> None:
        super().__init__()
        self.items: list[QueueItem] = []

    @property
    def pending(self) -> int:
        """Number of its requests without outcome."""
        return 0 if self.settled else 1


class AwaitedResult(ItemOwner):
    """One request; `future` gets its outcome."""

    __slots__ = ("done", "future")

    def __init__(self, future: asyncio.Future[InferResult]) -> None:
        super().__init__()
        self.done: dict[int, InferResult] = {}
        self.future = future

    def finish(self, index: int, answer: InferResult) -> None:
        if self.settled or len(self.items) == 1:
            super().finish(index, answer)
            return
        self.done[index] = answer
        if len(self.done) == len(self.items):
            super().finish(index, concatenate_results([self.done[i] for i in range(len(self.items))]))

    def resolve(self, outcome: InferResult | Exception) -> None:
        if self.future.done():
            return
        if isinstance(outcome, Exception):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


def concatenate_results(parts: list[InferResult]) -> InferResult:
    """Return the result of a request that ran in several items: their rows, in order."""
    if len(parts) == 1:
        return parts[0]
    return InferResult(
        {name: np.concatenate([part.outputs[name] for part in parts]) for name in parts[0].outputs},
        max(part.queue_seconds for part in parts),
        sum(part.compute_seconds for part in parts),
        max(part.batch_size for part in parts),
    )
