"""A request on its way through the engine, and its answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import ResourceError
from .arrays import Arrays
from .batching import Entry


@dataclass(frozen=True, slots=True)
class Answer:
    """Named outputs of one request, and what they cost. `batch_size`: rows of the batch it ran in."""

    outputs: Arrays
    queue_seconds: float
    compute_seconds: float
    batch_size: int

    def took(self) -> dict[str, Any]:
        """For logs and traces."""
        return {
            "queue_ms": round(1000 * self.queue_seconds, 3),
            "compute_ms": round(1000 * self.compute_seconds, 3),
            "batch": self.batch_size,
        }


@dataclass(slots=True, eq=False)
class Ticket:
    """One request while it waits for its entries."""

    future: asyncio.Future[Answer]
    entries: list[Entry] = field(default_factory=list)
    done: dict[int, Answer] = field(default_factory=dict)

    def fail(self, error: Exception) -> None:
        """The first outcome counts; later ones are dropped."""
        if self.future.done():
            return
        if isinstance(error, MemoryError):
            error = ResourceError("out of memory for this request")
        self.future.set_exception(error)

    def finish(self, index: int, answer: Answer) -> None:
        """The answer of one entry; with the last of them, the request is answered."""
        self.done[index] = answer
        if len(self.done) == len(self.entries) and not self.future.done():
            self.future.set_result(together([self.done[i] for i in range(len(self.entries))]))


def together(parts: list[Answer]) -> Answer:
    """The rows of all parts, in order."""
    if len(parts) == 1:
        return parts[0]
    return Answer(
        {name: np.concatenate([part.outputs[name] for part in parts]) for name in parts[0].outputs},
        max(part.queue_seconds for part in parts),
        sum(part.compute_seconds for part in parts),
        max(part.batch_size for part in parts),
    )
