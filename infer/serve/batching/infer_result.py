"""Result of a tensor request with its times, and the receivers that wait for one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import ResourceError
from .collate import Arrays


@dataclass(frozen=True, slots=True)
class WorkerTransfer:
    """Time between server and worker process, in seconds: `there` for the inputs, `back` for the outputs."""

    pid: int
    there: float
    back: float


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


def concatenate_results(
    parts: list[InferResult],
    join: Callable[[list[np.ndarray]], np.ndarray] = np.concatenate,
    axes: Mapping[str, int] | None = None,
) -> InferResult:
    """Return the result of a request that ran in several items: their rows, in order, or as `join` puts them.

    `axes`: of the rows of outputs that do not have them first.
    """
    if len(parts) == 1:
        return parts[0]
    return InferResult(
        {
            name: np.concatenate(arrays, axis) if (axis := (axes or {}).get(name, 0)) else join(arrays)
            for name, arrays in ((n, [part.outputs[n] for part in parts]) for n in parts[0].outputs)
        },
        max(part.queue_seconds for part in parts),
        sum(part.compute_seconds for part in parts),
        max(part.batch_size for part in parts),
    )
