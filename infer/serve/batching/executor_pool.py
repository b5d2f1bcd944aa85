"""All lanes of one engine: how they are together, and which of them is to be woken."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .event_loop_executor import Near, NearLane
from .executor import Executor
from .executor_thread import Lane

if TYPE_CHECKING:
    from .tensor_engine import Engine


class Lanes(list[Lane]):
    """One for each executor, in their order."""

    def __init__(self, engine: Engine, executors: Iterable[Executor]) -> None:
        super().__init__(
            NearLane(engine, executor, number)
            if isinstance(executor, Near)
            else Lane(engine, executor, number)
            for number, executor in enumerate(executors)
        )

    @property
    def running(self) -> int:
        """Rows of the batches that run."""
        return sum([lane.running for lane in self])

    @property
    def beat(self) -> float:
        """When the lane that is longest away last looked."""
        return min(lane.beat for lane in self)

    @property
    def failure(self) -> BaseException | None:
        """What the first that died died of."""
        return next((lane.failure for lane in self if lane.failure is not None), None)

    @property
    def answering(self) -> bool:
        """One of them at least can run a request now."""
        return any(lane.executor.answering for lane in self)

    def alive(self, now: float, seconds: float) -> bool:
        """Their threads live, and no batch in this process runs for longer than that; workers are watched by their
        lanes."""
        return self.failure is None and all(
            lane.thread.is_alive() and not (lane.running and lane.unwatched and now - lane.beat > seconds)
            for lane in self
        )

    def sleeper(self) -> Lane | None:
        """One that sleeps and is to be rung by the caller, who holds the engine's lock."""
        for lane in self:
            if lane.asleep:
                lane.asleep = False
                return lane
        return None

    def start(self) -> None:
        for lane in self:
            lane.start()

    def ring(self) -> None:
        for lane in self:
            lane.ring()

    def stop(self) -> None:
        """On the loop's thread."""
        for lane in self:
            lane.stop()

    def join(self, seconds: float) -> None:
        """Wait for each thread that was started, so long at most."""
        for lane in self:
            if lane.thread.ident is not None:
                lane.thread.join(seconds)
