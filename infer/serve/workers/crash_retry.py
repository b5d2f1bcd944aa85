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
        self._lock = threading.RLock()
        self._sent: dict[str, _TrackedRequest] = {}
        self._waiting: dict[str, _TrackedRequest] = {}
        self._suspects: deque[_TrackedRequest] = deque()
        self._on_trial: str | None = None
        self.epoch = 0  # of the process that the requests sent now are for
        self._open = True  # that process can be sent requests
        self._closed_with: InferError | None = None

    @property
    def busy(self) -> bool:
        """True while the worker has requests to run."""
        return bool(self._sent)

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
            if request.id in self._sent or request.id in self._waiting:
                raise InputError(f"a request named {request.id!r} is running", where="id")
            self._waiting[request.id] = _TrackedRequest(request, deliver, replay)

    def take_pending(self) -> tuple[int, list[Request]]:
        """Return the worker's epoch and the requests that it may get now.

        When that worker dies, its epoch ends and its unfinished requests are queued again.
        """
        with self._lock:
            return self.epoch, self._take_pending() if self._open else []

    def mark_written(self, id: str, epoch: int) -> None:
        """Record that the worker of this epoch was sent the request and may die of it."""
        with self._lock:
            if epoch == self.epoch and (tracked := self._sent.get(id)) is not None:
                tracked.written = True

    def _take_pending(self) -> list[Request]:
        with self._lock:
            if self._on_trial is not None:
                return []
            if self._suspects:
                chosen = [self._suspects.popleft()]
                self._on_trial = chosen[0].request.id
            else:
                chosen = list(self._waiting.values())
                self._waiting.clear()
            self._sent |= {tracked.request.id: tracked for tracked in chosen}
            return [tracked.request for tracked in chosen]

    def remove(self, id: str) -> bool:
        """Forget a request; return True when the worker has it."""
        with self._lock:
            self._waiting.pop(id, None)
            self._suspects = deque(tracked for tracked in self._suspects if tracked.request.id != id)
            self._on_trial = None if self._on_trial == id else self._on_trial
            return self._sent.pop(id, None) is not None

    def deliver(self, outputs: list[Output]) -> bool:
        """Pass outputs on, one call per receiver; return True when more requests may be sent."""
        batches: dict[Deliver, list[Output]] = {}
        with self._lock:
            for output in outputs:
                tracked = self._sent.get(output.id)
                if tracked is None:
                    continue
                tracked.started = True
                batches.setdefault(tracked.deliver, []).append(output)
                if output.finish is not None:
                    tracked.unfinished.discard(output.index)
                    if not tracked.unfinished:
                        del self._sent[output.id]
                if self._on_trial == output.id and (tracked.deaths < 2 or not tracked.unfinished):
                    self._on_trial = None
            more = self._on_trial is None and bool(self._suspects or self._waiting)
        for deliver, own in batches.items():
            _deliver(deliver, own)
        return more

    def reject(self, id: str, error: InferError) -> None:
        """Fail one request that the worker did not accept."""
        with self._lock:
            tracked = self._sent.pop(id, None)
            self._on_trial = None if self._on_trial == id else self._on_trial
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
            sent, self._sent = list(self._sent.values()), {}
            on_trial, self._on_trial = self._on_trial, None
            unread = [tracked for tracked in sent if not tracked.written]
            sent = [tracked for tracked in sent if tracked.written]
            self._suspects.extendleft(tracked for tracked in unread if tracked.deaths)
            first = {tracked.request.id: tracked for tracked in unread if not tracked.deaths}
            self._waiting = first | self._waiting
        blamed = 0
        for tracked in sent:
            tracked.deaths += 1
            if tracked.started and not tracked.replay:
                blamed = 2 * (len(sent) == 1 and self._second_lone_death(digest_of(tracked.request)))
                _fail(tracked, WorkerDiedError("the model's process died"))
            elif tracked.deaths > 1 and (len(sent) == 1 or tracked.request.id == on_trial):
                blamed = tracked.deaths
                self.quarantine.add(digest_of(tracked.request))
                _fail(tracked, PoisonError("the model's process died of this request, twice"))
            else:
                if tracked.started:
                    _deliver(tracked.deliver, [RestartedOutput(id=tracked.request.id, index=0)])
                tracked.reset()
                with self._lock:
                    self._suspects.append(tracked)
        return blamed

    def on_worker_restart(self) -> None:
        """Allow requests to be sent: a new worker process is ready."""
        with self._lock:
            self._open = True

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
            unanswered = [*self._sent.values(), *self._suspects, *self._waiting.values()]
            self._sent, self._waiting = {}, {}
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
