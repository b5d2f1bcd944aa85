"""Items of a batch queue, the batches that they run in, and their owners, which wait for the results."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ... import rows
from ...errors import InferError
from ...spec import BATCH
from .collate import Arrays, Collator
from .infer_result import InferResult, PendingResult, WorkerTransfer, concatenate_results

LOWEST_PRIORITY = 255
Urgency = tuple[float, float]  # priority, deadline; the least goes first
HeapEntry = tuple[float, float, int, "QueueItem"]  # urgency, order of arrival, item
Outcome = Arrays | Exception


@dataclass(slots=True, eq=False)
class QueueItem:
    """Rows that run in one batch: one request, or a part of it.

    A subclass may hold `requests` whole requests of equally many rows, in order, and divide them. `elements`: of one
    row of its largest input. `deadline`, `arrived`: clock seconds. `owner`: an `ItemOwner` that gets the result.
    `index`: number among the items of its owner. `row_work`: mean work of its rows as `LatencyModel` counts it; by
    default elements with padding.
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

    def __post_init__(self) -> None:
        self.row_work = self.row_work or max(self.elements, 1)

    @property
    def work(self) -> float:
        """Work of all its rows."""
        return self.rows * self.row_work

    @property
    def work_per_request(self) -> float:
        """Work of one of its requests."""
        return self.rows // self.requests * self.row_work

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


class FutureOwner(ItemOwner):
    """One request; `future` gets its outcome."""

    __slots__ = ("axes", "done", "future")

    def __init__(self, future: asyncio.Future[InferResult], axes: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self.axes = axes  # of the rows of each output
        self.done: dict[int, InferResult] = {}
        self.future = future

    def finish(self, index: int, answer: InferResult) -> None:
        if self.settled or len(self.items) == 1:
            super().finish(index, answer)
            return
        self.done[index] = answer
        if len(self.done) == len(self.items):
            super().finish(
                index, concatenate_results([self.done[i] for i in range(len(self.items))], axes=self.axes)
            )

    def resolve(self, outcome: InferResult | Exception) -> None:
        if self.future.done():
            return
        if isinstance(outcome, Exception):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


def queue_items(
    collator: Collator, owner: ItemOwner, arrays: Arrays, deadline: float, priority: int, tenant: str
) -> list[QueueItem]:
    """Return the items of a request: one, or as many as its rows need batches."""
    whole, items = collator.measure(arrays), []
    parts = collator.split(arrays, whole.rows)
    for index, part in enumerate(parts):
        sizes, count, size, work = whole.sizes, whole.rows, whole.size_bytes, whole.row_work
        if len(parts) > 1:
            count = rows.count(collator.inputs.values(), part)
            sizes = {**sizes, BATCH: count}
            size, work = sum(array.nbytes for array in part.values()), collator.row_work(part)
        items.append(
            QueueItem(
                inputs=part,
                sizes=sizes,
                key=whole.key,
                rows=count,
                elements=whole.elements,
                size_bytes=size,
                deadline=deadline,
                priority=priority,
                owner=owner,
                index=index,
                tenant=tenant,
                row_work=work,
            )
        )
    return items
