"""Watchdog of workers: only silence that was observed counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from infer.serve.workers import supervisor
from infer.serve.workers.messages import Heartbeat, ModelSource
from infer.serve.workers.restart_policy import WorkerLostError
from infer.serve.workers.supervisor import SupervisedWorker

PATIENCE = 30.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Silent(SupervisedWorker):
    """Says what is in `words`, in order; each look takes as long as was asked and `late` seconds more."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(ModelSource(path="model.infer"))
        self.words: list[Any] = []
        self.late, self._clock = 0.0, clock

    @property
    def channel(self) -> Any:
        return SimpleNamespace(receive=self._read)

    def _read(self, seconds: float) -> Any:
        if self.words:
            return self.words.pop(0)
        self._clock.now += seconds + self.late
        return None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=clock))
    return clock


def looks_until_lost(worker: Silent) -> int:
    for look in range(100):
        try:
            assert worker.receive(1.0, PATIENCE) is None
        except WorkerLostError:
            return look
    raise AssertionError("it is never lost")


def test_observed_silence_kills_the_worker(clock: Clock) -> None:
    assert looks_until_lost(Silent(clock)) == PATIENCE - 1


def test_single_wait_beyond_the_timeout_kills_the_worker(clock: Clock) -> None:
    with pytest.raises(WorkerLostError, match="30 s of silence"):
        Silent(clock).receive(None, PATIENCE)


def test_pause_between_reads_is_not_silence(clock: Clock) -> None:
    worker = Silent(clock)
    assert worker.receive(1.0, PATIENCE) is None
    clock.now += 600
    assert worker.receive(1.0, PATIENCE) is None
    worker.words = [Heartbeat()]
    assert worker.receive(1.0, PATIENCE) == Heartbeat()


def test_overlong_read_is_not_silence(clock: Clock) -> None:
    worker = Silent(clock)
    worker.late = 600.0
    assert worker.receive(1.0, PATIENCE) is None


def test_hung_worker_is_detected_after_a_pause(clock: Clock) -> None:
    worker = Silent(clock)
    clock.now += 600
    assert looks_until_lost(worker) == PATIENCE - 1
