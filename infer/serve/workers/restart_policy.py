"""Crashes of workers: errors, backoff of restarts, when to give up, and quarantine of requests that cause them."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from ...errors import InferError, NotReadyError, PoisonError, WorkerDiedError

MOST = 1024  # requests remembered


class WorkerLostError(Exception):
    """Death of the worker, or its kill after it hung, before it answered."""


class MessageNotSentError(WorkerLostError):
    """Death of the worker before the message could be sent."""


class WorkerSilentError(Exception):
    """Silence of a worker for longer than its batch should take."""


class RestartLimitError(InferError):
    """Give-up after too many deaths; restarting does not help."""


def error_for_requests(error: BaseException) -> InferError:
    """Return the error for requests that are unanswered when an engine ended for good."""
    if isinstance(error, RestartLimitError):
        return NotReadyError("the model's process died too often and is not started again")
    return WorkerDiedError("the engine died")


class WatchdogLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of silence after which a worker is killed.

    `batch`: while a batch runs, raised to ten times the p99 of its batches; `idle`: otherwise; `opening`:
    while it loads, also of heartbeats without progress.
    """

    batch: float = 30.0
    idle: float = 30.0
    opening: float = 120.0


class RestartLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits in seconds: a worker is given up after `deaths` within `window` without an answer."""

    first: float = 0.1
    longest: float = 30.0
    deaths: int = 5
    window: float = 60.0


class RestartPolicy:
    """Count of deaths of one worker; not thread-safe.

    Deaths that a request caused are attributed to the request, or clients could end a server with a few of
    them. But only a worker that has answered something else since is excused: a model that dies of every
    request is given up. A worker that answered since its start is always restarted.
    """

    def __init__(self, limits: RestartLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._deaths: deque[float] = deque()
        self._in_a_row = 0
        self._answered_since_start = False  # it answered something since it was last started
        self._answered_since_blame = False  # it answered something since a request was last found guilty
        self._excused, self._counted_since = False, 0  # deaths that counted since
        self.total = 0

    def blame_request(self, deaths: int = 2) -> None:
        """Attribute worker deaths to a request: the next one counted, and `deaths` before it."""
        if not self._answered_since_blame:
            return
        for _ in range(min(deaths - 1, self._counted_since, len(self._deaths))):
            self._deaths.pop()
        self._answered_since_blame, self._excused, self._counted_since = False, True, 0

    def record_death(self) -> float | None:
        """Count one death; return the seconds to wait before the restart, None to give up.

        The wait doubles with each death in a row.
        """
        now, limits = self._clock(), self._limits
        if self._answered_since_start:
            self._deaths.clear()
            self._counted_since = 0
        elif not self._excused:
            self._deaths.append(now)
            self._counted_since += 1
        self._excused = self._answered_since_start = False
        self.total += 1
        while self._deaths and now - self._deaths[0] > limits.window:
            self._deaths.popleft()
        if len(self._deaths) >= limits.deaths:
            return None
        wait = min(limits.first * 2**self._in_a_row, limits.longest)
        self._in_a_row += 1
        return wait

    def record_success(self) -> None:
        """Record an answer: the next death is the first in a row."""
        self._in_a_row, self._answered_since_start, self._answered_since_blame = 0, True, True

    def record_self_test(self) -> None:
        """Record that the worker passed its self-test after it started."""
        self._answered_since_blame = True


class Quarantine:
    """Bounded set of content digests, the oldest evicted first; thread-safe."""

    def __init__(self, most: int = MOST) -> None:
        self._most, self._lock = most, threading.Lock()
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._digests)

    def __contains__(self, digest: bytes) -> bool:
        with self._lock:
            return digest in self._digests

    def add(self, digest: bytes) -> None:
        with self._lock:
            self._digests[digest] = None
            self._digests.move_to_end(digest)
            while len(self._digests) > self._most:
                self._digests.popitem(last=False)

    def refuse(self, digest: bytes) -> None:
        """Raise `PoisonError` for a quarantined digest; callers skip hashing while this is empty."""
        if digest in self:
            raise PoisonError("the model's process crashed on this request twice; it is not run again")


def digest_of(arrays: Mapping[str, Any]) -> bytes:
    """Return a digest of the names, dtypes, shapes and bytes of the arrays."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(repr((name, array.dtype.str, array.shape)).encode())
        digest.update(array.reshape(-1).data)
    return digest.digest()
