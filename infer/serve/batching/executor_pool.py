"""Pool of the executor threads of one engine: common state, and waking of a sleeping one."""

from __future__ import annotations

from collections.abc import Iterable

from .executor import EngineHandle, Executor, PollingExecutor
from .executor_thread import ExecutorThread
from .loop_executor_thread import LoopExecutorThread


class ExecutorPool(list[ExecutorThread]):
    """One thread for each executor, in their order."""

    def __init__(self, engine: EngineHandle, executors: Iterable[Executor]) -> None:
        super().__init__(
            LoopExecutorThread(engine, executor, number)
            if isinstance(executor, PollingExecutor)
            else ExecutorThread(engine, executor, number)
            for number, executor in enumerate(executors)
        )

    @property
    def running(self) -> int:
        """Rows of the running batches."""
        return sum([thread.running for thread in self])

    @property
    def beat(self) -> float:
        """Oldest heartbeat of all threads, in clock seconds."""
        return min(thread.beat for thread in self)

    @property
    def failure(self) -> BaseException | None:
        """Error that ended a thread; None while all live."""
        return next((thread.failure for thread in self if thread.failure is not None), None)

    @property
    def answering(self) -> bool:
        """True if at least one executor can run a batch now."""
        return any(thread.executor.answering for thread in self)

    def alive(self, now: float, seconds: float) -> bool:
        """Return True if all threads live and no batch in this process runs for longer than `seconds`.

        Batches in workers do not count: their executors have a watchdog.
        """
        return self.failure is None and all(
            thread.thread.is_alive()
            and not (thread.running and thread.unmonitored and now - thread.beat > seconds)
            for thread in self
        )

    def claim_sleeping(self) -> ExecutorThread | None:
        """Return a sleeping thread, which the caller wakes and no other caller gets. Holds the engine's lock."""
        for thread in self:
            if thread.sleeping:
                thread.sleeping = False
                return thread
        return None

    def start(self) -> None:
        for thread in self:
            thread.start()

    def wake(self) -> None:
        """Wake all threads."""
        for thread in self:
            thread.wake()

    def stop(self) -> None:
        """End all threads; called on the event loop."""
        for thread in self:
            thread.stop()

    def join(self, seconds: float) -> None:
        """Wait up to `seconds` for each thread that was started."""
        for thread in self:
            if thread.thread.ident is not None:
                thread.thread.join(seconds)
