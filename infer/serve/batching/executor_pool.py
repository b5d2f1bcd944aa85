"""All lanes of one engine: how they are together, and which of them is to be woken."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .event_loop_executor import EventLoopExecutor, PollingExecutor
from .executor import Executor
from .executor_thread import ExecutorThread

if TYPE_CHECKING:
    from .tensor_engine import TensorEngine


class ExecutorPool(list[ExecutorThread]):
    """One for each executor, in their order."""

    def __init__(self, engine: TensorEngine, executors: Iterable[Executor]) -> None:
        super().__init__(
            EventLoopExecutor(engine, executor, number)
            if isinstance(executor, PollingExecutor)
            else ExecutorThread(engine, executor, number)
            for number, executor in enumerate(executors)
        )

    @property
    def running(self) -> int:
        """Rows of the batches that run."""
        return sum([thread.running for thread in self])

    @property
    def beat(self) -> float:
        """When the lane that is longest away last looked."""
        return min(thread.beat for thread in self)

    @property
    def failure(self) -> BaseException | None:
        """What the first that died died of."""
        return next((thread.failure for thread in self if thread.failure is not None), None)

    @property
    def answering(self) -> bool:
        """One of them at least can run a request now."""
        return any(thread.executor.answering for thread in self)

    def alive(self, now: float, seconds: float) -> bool:
        """Their threads live, and no batch in this process runs for longer than that; workers are watched by their
        lanes."""
        return self.failure is None and all(
            thread.thread.is_alive()
            and not (thread.running and thread.unmonitored and now - thread.beat > seconds)
            for thread in self
        )

    def claim_sleeping(self) -> ExecutorThread | None:
        """One that sleeps and is to be rung by the caller, who holds the engine's lock."""
        for thread in self:
            if thread.sleeping:
                thread.sleeping = False
                return thread
        return None

    def start(self) -> None:
        for thread in self:
            thread.start()

    def ring(self) -> None:
        for thread in self:
            thread.ring()

    def stop(self) -> None:
        """On the loop's thread."""
        for thread in self:
            thread.stop()

    def join(self, seconds: float) -> None:
        """Wait for each thread that was started, so long at most."""
        for thread in self:
            if thread.thread.ident is not None:
                thread.thread.join(seconds)
