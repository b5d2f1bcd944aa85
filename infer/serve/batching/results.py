"""A request on its way through the engine, and its answer."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...errors import ResourceError
from .queue_items import Entry
from .run_arrays import Arrays


@dataclass(frozen=True, slots=True)
class Hop:
    """To the process where the model ran, and back: seconds of each way, with what is done at its ends."""

    pid: int
    there: float
    back: float


@dataclass(frozen=True, slots=True)
class Answer:
    """Named outputs of one request, and what they cost. `batch_size`: rows of the batch it ran in; `hop`: None where
    that was in this process, or cannot be told."""

    outputs: Arrays
    queue_seconds: float
    compute_seconds: float
    batch_size: int
    hop: Hop | None = None

    def part(self, at: int, count: int) -> Answer:
        """That of one of `count` requests whose rows follow each other, equally many of each."""
        if count == 1:
            return self
        outputs = {}
        for name, array in self.outputs.items():
            each = len(array) // count
            outputs[name] = array[at * each : (at + 1) * each]
        return replace(self, outputs=outputs)

    def took(self) -> dict[str, Any]:
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


class Ticket(ABC):
    """Whoever gets an outcome. `settled`: it has it, or nobody wants it any more."""

    __slots__ = ("settled",)

    def __init__(self) -> None:
        self.settled = False

    @abstractmethod
    def tell(self, outcome: Answer | Exception) -> None:
        """Called once, on the loop's thread."""

    def fail(self, error: Exception) -> None:
        """The first outcome counts; later ones are dropped."""
        if self.settled:
            return
        self.settled = True
        self.tell(
            ResourceError("out of memory for this request") if isinstance(error, MemoryError) else error
        )

    def finish(self, index: int, answer: Answer) -> None:
        """The answer of one entry; with the last of them, it is told."""
        if not self.settled:
            self.settled = True
            self.tell(answer)


class Queued(Ticket):
    """One that has entries in the queue. `pending`: how many requests have no outcome yet."""

    __slots__ = ("entries",)

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []

    @property
    def pending(self) -> int:
        return 0 if self.settled else 1


class Awaited(Queued):
    """One request; `future` gets the outcome."""

    __slots__ = ("done", "future")

    def __init__(self, future: asyncio.Future[Answer]) -> None:
        super().__init__()
        self.done: dict[int, Answer] = {}
        self.future = future

    def finish(self, index: int, answer: Answer) -> None:
        if self.settled or len(self.entries) == 1:
            super().finish(index, answer)
            return
        self.done[index] = answer
        if len(self.done) == len(self.entries):
            super().finish(index, together([self.done[i] for i in range(len(self.entries))]))

    def tell(self, outcome: Answer | Exception) -> None:
        if self.future.done():
            return
        if isinstance(outcome, Exception):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


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
