"""Result of one batch, and its metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ..observability.metrics import ModelMetrics
from .arrays import Arrays
from .queue_items import QueueItem

Outcome = Arrays | Exception


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
