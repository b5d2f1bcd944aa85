"""Requests of a language-model worker, and their retries after the worker dies."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import deque
from typing import Any

import msgspec

from ...errors import InferError, InputError, PoisonError, WorkerDiedError
from ...llm.engine.requests import Deliver, Output, Request
from .restart_policy import Quarantine

log = logging.getLogger("infer.serve")


class FailedOutput(Output, frozen=True, kw_only=True):
    """Final output of all completions of a request that failed with `error`."""

    error: Any


class RestartedOutput(Output, frozen=True, kw_only=True):
    """Notice that a request starts again: its earlier outputs are void."""


class _TrackedRequest:
    """A request with its receiver and the number of worker deaths it was present at."""

    def __init__(self, request: Request, deliver: Deliver, replay: bool) -> None:
        self.request, self.deliver, self.replay = request, deliver, replay
        self.deaths = 0
        self.reset()

    def reset(self) -> None:
        self.started, self.unfinished = False, set(range(self.request.sampling.n))
        self.written = False  # the process may have read it


class RequestTable:
    """Requests of one worker; used from any thread.

    Requests in flight at a crash that have delivered no token are retried one at a time, each until its first
    token, while the others wait. One that is in flight at a second crash together with others is then run
    alone to its end. A request is quarantined when it was in flight at two crashes and alone at the last:
    only then is it certain that this request, not another one of its batch, kills the process.
    """

    def __init__(self) -> None:
        self.quarantine = Quarantine()
        self._broken_streams = Quarantine()  # streams that were alone at one death, and cannot be retried
        self._lock = threading.Lock()
        self._requests: dict[str, _TrackedRequest] = {}  # all: the worker has those that are in neither queue
        self._waiting: deque[_TrackedRequest] = deque()
        self._suspects: deque[_TrackedRequest] = deque()
        self._on_trial: _TrackedRequest | None = None
        self.epoch = 0  # of the process that the requests sent now are for
        self._open = True  # that process can be sent requests
        self._closed_with: InferError | None = None

    @property
    def sent(self) -> int:
        """Number of requests that the worker has."""
        with self._lock:
            return len(self._requests) - len(self._waiting) - len(self._suspects)

    def add(self, request: Request, deliver: Deliver, *, replay: bool = False) -> None:
        """Queue a request for the worker.

        `replay`: nothing is read of its outputs before the last one, so that it may be restarted after it
        began. Raises `PoisonError` for a quarantined request and `InputError` for an id that is in use.
        """
        if len(self.quarantine):
            self.quarantine.refuse(digest_of(request))
        with self._lock:
            if self._closed_with is not None:
                raise self._closed_with
            if request.id in self._requests:
                raise InputError(f"a request named {request.id!r} is running", where="id")
            tracked = self._requests[request.id] = _TrackedRequest(request, deliver, replay)
            self._waiting.append(tracked)

    def take_pending(self) -> tuple[int, list[Request]]:
        """Return the worker's epoch and the requests that it may get now.

        When that worker dies, its epoch ends and its unfinished requests are queued again.
        """
        with self._lock:
            if not self._open or self._on_trial is not None:
                return self.epoch, []
            if self._suspects:
                self._on_trial = self._suspects.popleft()
                return self.epoch, [self._on_trial.request]
            chosen, self._waiting = self._waiting, deque()
            return self.epoch, [tracked.request for tracked in chosen]

    def mark_written(self, id: str, epoch: int) -> None:
        """Record that the worker of this epoch was sent the request and may die of it."""
        with self._lock:
            if epoch == self.epoch and (tracked := self._requests.get(id)) is not None:
                tracked.written = True

    def remove(self, id: str) -> bool:
        """Forget a request; return True when the worker has it."""
        with self._lock:
            if (tracked := self._forget(id)) is None:
                return False
            for queue in (self._waiting, self._suspects):
                if tracked in queue:
                    queue.remove(tracked)
                    return False
            return True

    def deliver(self, outputs: list[Output]) -> bool:
        """Pass outputs on, one call for each request; return True when more requests may be sent."""
        batches: dict[_TrackedRequest, list[Output]] = {}
        with self._lock:
            for output in outputs:
                tracked = self._requests.get(output.id)
                if tracked is None:
                    continue
                tracked.started = True
                batches.setdefault(tracked, []).append(output)
                if output.finish is not None:
                    tracked.unfinished.discard(output.index)
                    if not tracked.unfinished:
                        self._forget(output.id)
                if self._on_trial is tracked and tracked.deaths < 2:
                    self._on_trial = None
            more = self._on_trial is None and bool(self._suspects or self._waiting)
        for tracked, own in batches.items():
            _deliver(tracked.deliver, own)
        return more

    def reject(self, id: str, error: InferError) -> None:
        """Fail one request that the worker did not accept."""
        with self._lock:
            tracked = self._forget(id)
        if tracked is not None:
            _fail(tracked, error)

    def on_worker_death(self) -> int:
        """Retry, reject or fail the requests that a dead worker had.

        Requests that had delivered a token fail. Returns the number of deaths attributed to a request that
        was quarantined now, else 0.
        """
        with self._lock:
            self.epoch += 1
            self._open = False
            queued = {*self._waiting, *self._suspects}
            sent = [tracked for tracked in self._requests.values() if tracked not in queued]
            on_trial, self._on_trial = self._on_trial, None
            unread = [tracked for tracked in sent if not tracked.written]
            sent = [tracked for tracked in sent if tracked.written]
            self._suspects.extendleft(tracked for tracked in unread if tracked.deaths)
            self._waiting.extendleft(tracked for tracked in reversed(unread) if not tracked.deaths)
            retried, failed, blamed = list[_TrackedRequest](), list[tuple[_TrackedRequest, InferError]](), 0
            for tracked in sent:
                tracked.deaths += 1
                if tracked.started and not tracked.replay:
                    blamed = 2 * (len(sent) == 1 and self._second_lone_death(digest_of(tracked.request)))
                    failed.append((tracked, WorkerDiedError("the model's process died")))
                elif tracked.deaths > 1 and (len(sent) == 1 or tracked is on_trial):
                    blamed = tracked.deaths
                    self.quarantine.add(digest_of(tracked.request))
                    failed.append((tracked, PoisonError("the model's process died of this request, twice")))
                else:
                    if tracked.started:
                        retried.append(tracked)
                    tracked.reset()
                    self._suspects.append(tracked)
            for tracked, _ in failed:
                self._forget(tracked.request.id)
        for tracked in retried:
            _deliver(tracked.deliver, [RestartedOutput(id=tracked.request.id, index=0)])
        for tracked, error in failed:
            _fail(tracked, error)
        return blamed

    def on_worker_restart(self) -> None:
        """Allow requests to be sent: a new worker process is ready."""
        with self._lock:
            self._open = True

    def _forget(self, id: str) -> _TrackedRequest | None:
        tracked = self._requests.pop(id, None)
        self._on_trial = None if self._on_trial is tracked else self._on_trial
        return tracked

    def _second_lone_death(self, digest: bytes) -> bool:
        """Quarantine a stream that was alone at a second death; return True if so."""
        if digest not in self._broken_streams:
            self._broken_streams.add(digest)
            return False
        self.quarantine.add(digest)
        return True

    def fail_all(self, error: InferError) -> None:
        """Fail all requests, and every later one, with `error`."""
        with self._lock:
            self.epoch += 1
            self._open, self._closed_with = False, error
            unanswered = list(self._requests.values())
            self._requests.clear()
            self._waiting.clear()
            self._suspects.clear()
        for tracked in unanswered:
            _fail(tracked, error)


def digest_of(request: Request) -> bytes:
    """Return a digest of everything in the request except its id and tenant."""
    content = msgspec.structs.replace(request, id="", tenant="", salt="")
    return hashlib.blake2b(msgspec.msgpack.encode(content), digest_size=16).digest()


def _fail(tracked: _TrackedRequest, error: InferError) -> None:
    _deliver(tracked.deliver, [FailedOutput(id=tracked.request.id, index=0, finish="error", error=error)])


def _deliver(deliver: Deliver, outputs: list[Output]) -> None:
    try:
        deliver(outputs)
    except Exception:
        log.exception("outputs could not be delivered")
