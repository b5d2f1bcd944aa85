"""A request on its way through the engine, and its answer."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...errors import ResourceError
from .queue_items import QueueItem
from .run_arrays import Arrays


@dataclass(frozen=True, slots=True)
class WorkerTransfer:
    """To the process where the model ran, and back: seconds of each way, with what is done at its ends."""

    pid: int
    there: float
    back: float


@dataclass(frozen=True, slots=True)
class InferResult:
    """Named outputs of one request, and what they cost. `batch_size`: rows of the batch it ran in; `hop`: None where
    that was in this process, or cannot be told."""

    outputs: Arrays
    queue_seconds: float
    compute_seconds: float
    batch_size: int
    hop: WorkerTransfer | None = None

    def slice_request(self, at: int, count: int) -> InferResult:
        """That of one of `count` requests whose rows follow each other, equally many of each."""
        if count == 1:
            return self
        outputs = {}
        for name, array in self.outputs.items():
            each = len(array) // count
            outputs[name] = array[at * each : (at + 1) * each]
        return replace(self, outputs=outputs)

    def timings(self) -> dict[str, Any]:
        """For logs and traces."""
        found: dict[str, Any] = {
            "queue_ms": round(1000 * self.queue_seconds, 3),
            "compute_ms": round(1000 * self.compute_seconds, 3),
            "batch": self.batch_size,
        }
        if (hop := self.hop) is not None:
            there, back = round(1000 * hop.there, 3), round(1000 * hop.back, 3)
            found |= {"worker": hop.pid, "there_ms": there, "back_ms": back}
        return found


class PendingResult(ABC):
    """Whoever gets an outcome. `settled`: it has it, or nobody wants it any more."""

    __slots__ = ("settled",)

    def __init__(self) -> None:
        self.settled = False

    @abstractmethod
    def tell(self, outcome: InferResult | Exception) -> None:
        """Called once, on the loop's thread."""

    def fail(self, error: Exception) -> None:
        """The first outcome counts; later ones are dropped."""
        if self.settled:
            return
        self.settled = True
        self.tell(
            ResourceError("out of memory for this request") if isinstance(error, MemoryError) else error
        )

    def finish(self, index: int, answer: InferResult) -> None:
        """The answer of one entry; with the last of them, it is told."""
        if not self.settled:
            self.settled = True
            self.tell(answer)


class ItemOwner(PendingResult):
    """One that has entries in the queue. `pending`: how many requests have no outcome yet."""

    __slots__ = ("items",)

    def __init__(self) -> None:
        super().__init__()
        self.items: list[QueueItem] = []

    @property
    def pending(self) -> int:
        return 0 if self.settled else 1


class AwaitedResult(ItemOwner):
    """One request; `future` gets the outcome."""

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

    def tell(self, outcome: InferResult | Exception) -> None:
        if self.future.done():
            return
        if isinstance(outcome, Exception):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


def concatenate_results(parts: list[InferResult]) -> InferResult:
    """The rows of all parts, in order."""
    if len(parts) == 1:
        return parts[0]
    return InferResult(
        {name: np.concatenate([part.outputs[name] for part in parts]) for name in parts[0].outputs},
        max(part.queue_seconds for part in parts),
        sum(part.compute_seconds for part in parts),
        max(part.batch_size for part in parts),
    )
