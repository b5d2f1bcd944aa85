"""One batch after it ran, and what is counted of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ..observability.metrics import ModelMetrics
from .queue_items import Entry
from .run_arrays import Arrays

Outcome = Arrays | Exception


@dataclass(slots=True)
class Ran:
    """Per entry its outputs or the reason that it has none. Seconds."""

    entries: list[Entry]
    outcomes: list[Outcome]
    started: float
    reason: str
    assemble: float = 0.0
    compute: float = 0.0
    cut: float = 0.0
    padding: float = 0.0
    worker: int | None = None  # the process in which it ran, and from when
    began: float = 0.0

    @property
    def rows(self) -> int:
        return sum([entry.rows for entry in self.entries])


def count_batch(ran: Ran, metrics: ModelMetrics, ragged: Iterable[str]) -> None:
    """`ragged`: the sizes that make the length of a row."""
    metrics.dispatched(ran.reason)
    metrics.executed(ran.rows, ran.assemble, ran.compute, ran.cut, ran.padding)
    if ragged:
        tokens = [math.prod([entry.sizes[size] for size in ragged]) * entry.rows for entry in ran.entries]
        metrics.batch_tokens.observe(sum(tokens))
    good, waits = 0, list[tuple[float, int]]()
    for entry, outcome in zip(ran.entries, ran.outcomes, strict=True):
        queued = ran.started - entry.arrived
        if isinstance(outcome, Exception):
            metrics.failed(queued + ran.compute)
        else:
            good += entry.rows
            waits.append((queued, entry.requests))
    metrics.answered(good, waits, ran.assemble, ran.compute, ran.cut)
