"""Thread that runs an engine: requests come from any thread, the outputs of each step go out in one call."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Any, Protocol

from ...errors import InferError, InputError, NotReadyError, OverloadedError
from .requests import Deliver, Output, Request
from .stop_conditions import error_fields

log = logging.getLogger("infer.llm")
HEARTBEAT_SECONDS = 0.5  # between two signs of life of an idle engine thread
CLOSE_SECONDS = 30.0
MAX_INBOX = 1024  # requests that came since the last step began


class SteppedEngine(Protocol):
    """Interface of `infer.llm.engine.engine.Engine`; all but `check` is called on the engine's thread."""

    @property
    def idle(self) -> bool: ...

    def check(self, request: Request) -> None:
        """Raise `InputError`, or `OverloadedError`, for what `submit` would refuse."""

    def submit(self, request: Request) -> None: ...

    def cancel(self, id: str) -> object: ...

    def step(self) -> list[Output]: ...

    def stats(self) -> Any: ...


class _Submission:
    """A running request: the receiver of its outputs, and its unfinished completions."""

    def __init__(self, request: Request, deliver: Deliver) -> None:
        self.request, self.deliver = request, deliver
        self.unfinished = set(range(request.sampling.n))


class EngineThread:
    """Thread that owns an engine.

    `beat`: `time.monotonic()` of the loop's last turn; `steps`: number of steps run; `failure`: the exception that
    ended the engine, or None.

    `submit(request, deliver)`: `deliver` is called on this thread, once a step with all outputs of the requests that
    were submitted with it. Every completion ends with an `Output` whose `finish` is set, also when it is cancelled or
    the engine fails.
    """

    pid: int | None = None  # of a process of its own, which it has not

    def __init__(self, engine: Any, *, name: str = "engine") -> None:
        self.engine: SteppedEngine = engine
        self.failure: BaseException | None = None
        self.beat, self.steps = time.monotonic(), 0
        self._changed = threading.Condition()
        self._inbox: deque[tuple[str, _Submission | None]] = deque()  # (id, None): cancel it
        self._unsubmitted: deque[_Submission] = deque()
        self._known: set[str] = set()  # submitted and not finished
        self._running: dict[str, _Submission] = {}  # of the loop's own
        self._draining = self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"infer {name}", daemon=True)
        self._thread.start()

    def submit(self, request: Request, deliver: Deliver, *, replay: bool = False) -> None:
        """Queue a request for the engine's thread; `replay` is for engines that may begin again, this one can't.

        Raises `InputError` or `OverloadedError` as the engine's `check` does, `NotReadyError` once draining.
        """
        self.engine.check(request)
        with self._changed:
            if self.failure is not None:
                raise NotReadyError(f"the engine died: {self.failure}") from self.failure
            if self._draining:
                raise NotReadyError("the engine is stopping")
            if len(self._inbox) >= MAX_INBOX:
                raise OverloadedError(f"{len(self._inbox)} requests came at once")
            if request.id in self._known:
                raise InputError(f"a request named {request.id!r} is running", where="id")
            self._known.add(request.id)
            self._inbox.append((request.id, _Submission(request, deliver)))
            self._changed.notify_all()

    def cancel(self, id: str) -> None:
        """Cancel a request at the next step; finished and unknown ids are ignored."""
        with self._changed:
            if id in self._known:
                self._inbox.append((id, None))
                self._changed.notify_all()

    @property
    def ready(self) -> bool:
        """True while it takes requests."""
        return self.failure is None

    @property
    def running(self) -> int:
        """Number of submitted requests that are not finished."""
        return len(self._known)

    def stats(self) -> Any:
        """Return the engine's counters, also in the middle of a step."""
        return self.engine.stats()

    def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests and wait until the running ones are finished; False after `timeout` seconds."""
        with self._changed:
            self._draining = True
            return self._changed.wait_for(lambda: not self._known, timeout)

    def close(self) -> None:
        """Cancel all requests and end the thread; may be called twice, and from `deliver`."""
        with self._changed:
            self._draining = self._closing = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            while self._process_inbox():
                outputs = [] if self.engine.idle else self.engine.step()
                self.steps += 1
                self.beat = time.monotonic()
                self._deliver([o for o in outputs if o.id in self._running])
        except BaseException as error:
            log.critical("the engine died", exc_info=error)
            self._fail(error)
            return
        for id in self._running:
            self.engine.cancel(id)
        self._end("cancelled", None)

    def _process_inbox(self) -> bool:
        """Wait until there is work, apply submissions and cancellations; False when closing."""
        with self._changed:
            while not (self._inbox or self._unsubmitted or self._closing) and self.engine.idle:
                self.beat = time.monotonic()
                self._changed.wait(HEARTBEAT_SECONDS)
            messages, self._inbox = self._inbox, deque()
            if self._closing:
                self._running |= {id: submission for id, submission in messages if submission is not None}
                return False
        ended: list[Output] = []
        for id, submission in messages:
            if submission is not None:
                self._running[id] = submission
                self._unsubmitted.append(submission)
            elif id in self._running:
                self.engine.cancel(id)
                ended += _final_outputs(self._running[id], "cancelled", None)
        self._deliver(ended)
        self._deliver(self._admit())
        return True

    def _admit(self) -> list[Output]:
        """Submit requests to the engine; those beyond its queue limits wait for the next turn."""
        ended: list[Output] = []
        while self._unsubmitted:
            request = self._unsubmitted[0].request
            if self._running.get(request.id) is self._unsubmitted[0]:
                try:
                    self.engine.submit(request)
                except OverloadedError:
                    break
                except InferError as error:  # what `check` could not know
                    ended += _final_outputs(self._unsubmitted[0], "error", *error_fields(error))
            self._unsubmitted.popleft()
        return ended

    def _deliver(self, outputs: list[Output]) -> None:
        """Deliver outputs of running requests, one call for each `deliver`."""
        batches: dict[Deliver, list[Output]] = {}
        finished = []
        for output in outputs:
            submission = self._running.get(output.id)
            if submission is None:
                continue
            batches.setdefault(submission.deliver, []).append(output)
            if output.finish is not None:
                submission.unfinished.discard(output.index)
                if not submission.unfinished:
                    finished.append(output.id)
                    del self._running[output.id]
        for deliver, own in batches.items():
            try:
                deliver(own)
            except Exception:
                log.exception("outputs could not be delivered; their requests are cancelled")
                for output in own:
                    if self._running.pop(output.id, None) is not None:
                        finished.append(output.id)
                        if self.failure is None:
                            self.engine.cancel(output.id)
        if finished:
            with self._changed:
                self._known.difference_update(finished)
                self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self.failure, self._draining = error, True
            self._running |= {id: submission for id, submission in self._inbox if submission is not None}
            self._inbox.clear()
        self._end("error", f"the engine died: {type(error).__name__}: {error}")

    def _end(self, finish: Any, why: str | None) -> None:
        self._deliver(
            [o for submission in self._running.values() for o in _final_outputs(submission, finish, why)]
        )


def _final_outputs(submission: _Submission, finish: Any, why: str | None, fault: str = "") -> list[Output]:
    id = submission.request.id
    return [
        Output(id=id, index=i, finish=finish, stopped_by=why, fault=fault)
        for i in sorted(submission.unfinished)
    ]
