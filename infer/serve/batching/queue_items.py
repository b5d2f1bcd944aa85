"""Items of a batch queue, each a part of one request or several whole requests, and the batches that they run in."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..observability.metrics import ModelMetrics
from .collate import BATCH, Arrays

LOWEST_PRIORITY = 255
Urgency = tuple[float, float]  # priority, deadline; the least goes first
HeapEntry = tuple[float, float, int, "QueueItem"]  # urgency, order of arrival, item
Outcome = Arrays | Exception


@dataclass(slots=True, eq=False)
class QueueItem:
    """Rows that run in one batch: part of one request, or `requests` whole requests of equally many rows, in order.

    `elements`: of one row of its largest input. `deadline`, `arrived`: clock seconds. `owner`: a `results.ItemOwner`
    that gets the result; one of several requests has them in `requests`, in the order of the rows, and gives up the
    first of them by `split_off`. `index`: number among the items of its owner.
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

    @property
    def work(self) -> int:
        """Work as `LatencyModel` counts it: rows x elements."""
        return self.rows * max(self.elements, 1)

    @property
    def work_per_request(self) -> int:
        """Work of one of its requests."""
        return self.rows // self.requests * max(self.elements, 1)

    def take(self, count: int) -> QueueItem:
        """Split off its first `count` requests, with an owner of their own."""
        taken = self._slice(0, count, None)
        taken.owner = self.owner.split_off(count, taken)
        self._become(self._slice(count, self.requests, None))
        return taken

    def drop(self, at: int) -> None:
        """Remove request number `at` of several."""
        each = self.rows // self.requests
        rest = self._slice(1, self.requests, None)
        gone = slice(at * each, (at + 1) * each)
        rest.inputs = {name: np.delete(array, gone, 0) for name, array in self.inputs.items()}
        self._become(rest)
        del self.owner.requests[at]

    def split(self) -> list[QueueItem]:
        """Return one item for each of its requests, each with its own owner."""
        owners = getattr(self.owner, "requests", None)
        if owners is None:
            return [self]
        if len(owners) == 1:
            return [replace(self, owner=owners[0])]
        return [self._slice(at, at + 1, owner) for at, owner in enumerate(owners)]

    def _slice(self, start: int, stop: int, owner: Any) -> QueueItem:
        each, size, count = self.rows // self.requests, self.size_bytes // self.requests, stop - start
        return replace(
            self,
            inputs={name: array[start * each : stop * each] for name, array in self.inputs.items()},
            sizes={**self.sizes, BATCH: count * each},
            rows=count * each,
            size_bytes=count * size,
            requests=count,
            owner=owner,
        )

    def _become(self, other: QueueItem) -> None:
        self.inputs, self.sizes, self.rows = other.inputs, other.sizes, other.rows
        self.size_bytes, self.requests = other.size_bytes, other.requests


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
