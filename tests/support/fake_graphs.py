"""Stand-in of CUDA graphs and a stream: a call is recorded with its addresses and run again by replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from infer.llm.step.cuda_graphs import GraphedStep


class FakeEvent:
    """Place in the queue of a `FakeGraphs`."""

    def __init__(self, owner: FakeGraphs) -> None:
        self._owner, self._mark = owner, 0

    def record(self) -> None:
        self._mark = self._owner.enqueued

    def synchronize(self) -> None:
        self._owner.run_until(self._mark)


class FakeGraphs:
    """`lazy`: what is enqueued runs when an event behind it is waited for, so that a buffer reused too early shows.

    `error`: text of the error that recordings raise, of type `raised`.
    """

    def __init__(
        self, error: str = "", *, lazy: bool = False, raised: type[Exception] = RuntimeError
    ) -> None:
        self.error, self.lazy, self.raised = error, lazy, raised
        self.records = self.replays = self.clears = self.enqueued = self.ran = 0
        self._queue: list[Callable[[], object]] = []
        self._running = False

    def record(self, call: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        if self.error:
            raise self.raised(self.error)
        self.run_until(self.enqueued)
        self.records += 1
        result = call()

        def replay() -> None:
            self.replays += 1
            self.enqueue(lambda: result.copy_(call()))

        return replay, result

    def clear(self) -> None:
        self.clears += 1

    def new_event(self) -> FakeEvent:
        return FakeEvent(self)

    def enqueue(self, call: Callable[[], object]) -> None:
        self._queue.append(call)
        self.enqueued += 1
        if not self.lazy:
            self.run_until(self.enqueued)

    def run_until(self, mark: int) -> None:
        """Run what was enqueued up to the mark, in order."""
        while self.ran < mark and not self._running:
            self._running = True
            with torch.inference_mode():
                self._queue.pop(0)()
            self._running = False
            self.ran += 1


class InOrder:
    """A step whose plain calls come behind what is enqueued, as on a stream."""

    def __init__(self, step: Any, graphs: FakeGraphs) -> None:
        self.step, self._graphs = step, graphs

    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        self._graphs.run_until(self._graphs.enqueued)
        found: Mapping[str, Tensor] = self.step.run(inputs)
        return found

    def close(self) -> None: ...


class InOrderGraphs(GraphedStep):
    """Recorded steps whose logits the host takes once they are there, as on a stream."""

    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        with torch.inference_mode():
            logits = self.launch(inputs)
            graphs: Any = self.recorder
            graphs.run_until(graphs.enqueued)
            if logits is None:
                found: Mapping[str, Tensor] = self.step.run(inputs)
                return found
            return {"logits": logits[: len(inputs["logit_rows"])].clone()}


def recorded(step: Any) -> tuple[GraphedStep, FakeGraphs]:
    """Return a step on lazy graphs, and those."""
    graphs = FakeGraphs(lazy=True)
    return InOrderGraphs(InOrder(step, graphs), "cpu", graphs), graphs
