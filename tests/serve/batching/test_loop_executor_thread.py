"""Delayed batches of an executor driven by the event loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from infer.serve.batching.loop_executor_thread import LoopExecutorThread


class Timer:
    def __init__(self, when: float, callback: Any) -> None:
        self._when, self.callback, self.cancelled = when, callback, False

    def when(self) -> float:
        return self._when

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """Keeps the timers that were asked for."""

    def __init__(self) -> None:
        self.now, self.timers = 100.0, list[Timer]()

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, callback: Any) -> Timer:
        self.timers.append(Timer(self.now + seconds, callback))
        return self.timers[-1]

    @property
    def due(self) -> list[float]:
        return [timer.when() for timer in self.timers if not timer.cancelled]


def test_a_delayed_batch_starts_one_timer() -> None:
    loop, polls = Loop(), []
    engine: Any = SimpleNamespace(loop=loop, clock=loop.time, predictor=SimpleNamespace(name="m"))
    executor: Any = SimpleNamespace(watched=True)
    thread = LoopExecutorThread(engine, executor, 0)
    thread.poll_queue = lambda: polls.append(loop.now)  # type: ignore[method-assign]
    for _ in range(5):
        thread._schedule_poll(105.0 - loop.now)
        loop.now += 0.5
    assert loop.due == [105.0]
    thread._schedule_poll(0.5)  # the one that waited longest is gone, another has less time
    assert loop.due == [103.0]
    loop.now = 103.0
    loop.timers.pop().callback()
    assert polls == [103.0]
    thread._schedule_poll(2.0)
    assert loop.timers[-1].when() == 105.0
    thread.stop()
    assert loop.due == []
