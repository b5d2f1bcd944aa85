"""A worker is killed for its silence, but only for what was listened to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from infer.serve.workers import supervisor
from infer.serve.workers.messages import Beat, Source
from infer.serve.workers.supervisor import LostError, Supervised

PATIENCE = 30.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Silent(Supervised):
    """Says what is in `words`, in order; each look takes as long as was asked and `late` seconds more."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(Source(path="model.infer"))
        self.words: list[Any] = []
        self.late, self._clock = 0.0, clock

    @property
    def channel(self) -> Any:
        return self

    def receive(self, seconds: float) -> Any:
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
            assert worker.hear(1.0, PATIENCE) is None
        except LostError:
            return look
    raise AssertionError("it is never lost")


def test_silence_that_was_listened_to_ends_it(clock: Clock) -> None:
    assert looks_until_lost(Silent(clock)) == PATIENCE - 1


def test_one_wait_as_long_as_its_patience_ends_it(clock: Clock) -> None:
    with pytest.raises(LostError, match="30 s of silence"):
        Silent(clock).hear(None, PATIENCE)


def test_a_pause_between_two_looks_is_no_silence(clock: Clock) -> None:
    worker = Silent(clock)
    assert worker.hear(1.0, PATIENCE) is None
    clock.now += 600
    assert worker.hear(1.0, PATIENCE) is None
    worker.words = [Beat()]
    assert worker.hear(1.0, PATIENCE) == Beat()


def test_a_look_that_takes_far_too_long_is_no_silence(clock: Clock) -> None:
    worker = Silent(clock)
    worker.late = 600.0
    assert worker.hear(1.0, PATIENCE) is None


def test_a_hung_worker_is_found_after_a_pause_too(clock: Clock) -> None:
    worker = Silent(clock)
    clock.now += 600
    assert looks_until_lost(worker) == PATIENCE - 1
