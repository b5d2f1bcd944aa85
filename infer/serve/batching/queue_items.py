"""What waits for a batch: a piece of one request, or several whole requests that are alike."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .collate import BATCH


@dataclass(slots=True, eq=False)
class QueueItem:
    """A piece of one request that runs in one batch, or `requests` whole ones of equally many rows, in their order.

    `elements`: of one row of its largest input; `owner`: its owner, a `results.Queued`; that of several requests has
    them in `requests`, one for each in the order of the rows, and splits off the first of them by `split_off`.
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
    deaths: int = 0  # of workers while it ran
    requests: int = 1
    tenant: str = ""  # whose share of the queue it takes

    @property
    def work(self) -> int:
        """What `Speed` counts."""
        return self.rows * max(self.elements, 1)

    @property
    def least(self) -> int:
        """The same of one of its requests."""
        return self.rows // self.requests * max(self.elements, 1)

    def take(self, count: int) -> QueueItem:
        """Its first `count` requests, with a ticket of theirs; the others stay here."""
        taken = self._between(0, count, None)
        taken.owner = self.owner.split_off(count, taken)
        self._become(self._between(count, self.requests, None))
        return taken

    def drop(self, at: int) -> None:
        """One of several requests is out."""
        each = self.rows // self.requests
        rest = self._between(1, self.requests, None)
        gone = slice(at * each, (at + 1) * each)
        rest.inputs = {name: np.delete(array, gone, 0) for name, array in self.inputs.items()}
        self._become(rest)
        del self.owner.requests[at]

    def apart(self) -> list[QueueItem]:
        """Its requests one by one, each with its own ticket."""
        owners = getattr(self.owner, "requests", None)
        if owners is None:
            return [self]
        if len(owners) == 1:
            return [replace(self, owner=owners[0])]
        return [self._between(at, at + 1, owner) for at, owner in enumerate(owners)]

    def _between(self, start: int, stop: int, owner: Any) -> QueueItem:
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
