"""Thread that runs an engine: requests come from any thread, the outputs of each step go out in one call."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from ...errors import InferError, InputError, NotReadyError, OverloadedError
from .requests import Deliver, FinishReason, Output, Request
from .stop_conditions import error_fields

if TYPE_CHECKING:
    from .engine import Engine

log = logging.getLogger("infer.llm")
HEARTBEAT_SECONDS = 0.5  # between two signs of life of an idle engine thread
CLOSE_SECONDS = 30.0
MAX_INBOX = 1024  # requests that came since the last step began


class Submission:
    """A request that is not finished: the receiver of its outputs, and its unfinished completions.

    `held`: what it needs until the engine begins with it, as its compiled grammar.
    """

    __slots__ = ("deliver", "held", "request", "unfinished")

    def __init__(self, request: Request, deliver: Deliver) -> None:
        self.request, self.deliver = request, deliver
        self.held: object = None
        self.unfinished = set(range(request.sampling.n))

    def end(self, finish: FinishReason, why: str | None, fault: str = "") -> list[Output]:
        """Return the last outputs of the unfinished completions."""
        id = self.request.id
        return [
            Output(id=id, index=i, finish=finish, stopped_by=why, fault=fault)
            for i in sorted(self.unfinished)
        ]


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
        self.engine: Engine = engine
        self.failure: BaseException | None = None
        self.beat, self.steps = time.monotonic(), 0
        self._changed = threading.Condition()
        self._requests: dict[str, Submission] = {}  # submitted and not finished
        self._inbox: deque[Submission | str] = deque()  # to begin, or the id of one to cancel
        self._draining = self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"infer {name}", daemon=True)
        self._thread.start()

    def submit(self, request: Request, deliver: Deliver, *, replay: bool = False) -> None:
        """Queue a request for the engine's thread; `replay` is for engines that may begin again, this one can't.

        Raises `InputError` or `OverloadedError` as the engine's `check` does, `NotReadyError` once draining.
        """
        self.engine.check(request)
        self._begin(self.reserve(request, deliver))

    def reserve(self, request: Request, deliver: Deliver) -> Submission:
        """Take a request that can be cancelled from now on, and that `admit` or `withdraw` follows."""
        with self._changed:
            if self.failure is not None:
                raise NotReadyError(f"the engine died: {self.failure}") from self.failure
            if self._draining:
                raise NotReadyError("the engine is stopping")
            if len(self._inbox) >= MAX_INBOX:
                raise OverloadedError(f"{len(self._inbox)} requests came at once")
            if request.id in self._requests:
                raise InputError(f"a request named {request.id!r} is running", where="id")
            submission = self._requests[request.id] = Submission(request, deliver)
            return submission

    def admit(self, submission: Submission) -> None:
        """Queue a reserved request, unless it was cancelled; raises what `submit` does."""
        self.engine.check(submission.request)
        self._begin(submission)

    def withdraw(self, submission: Submission) -> bool:
        """Forget a reserved request, which gets no output; False if it was cancelled meanwhile."""
        with self._changed:
            is_live = self._is_live(submission)
            if is_live:
                del self._requests[submission.request.id]
                self._changed.notify_all()
            return is_live

    def cancel(self, id: str) -> None:
        """Cancel a request at the next step; finished and unknown ids are ignored."""
        with self._changed:
            if id in self._requests:
                self._inbox.append(id)
                self._changed.notify_all()

    @property
    def ready(self) -> bool:
        """True while it takes requests."""
        return self.failure is None

    @property
    def running(self) -> int:
        """Number of submitted requests that are not finished."""
        return len(self._requests)

    def stats(self) -> Any:
        """Return the engine's counters, also in the middle of a step."""
        return self.engine.stats()

    def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests and wait until the running ones are finished; False after `timeout` seconds."""
        with self._changed:
            self._draining = True
            return self._changed.wait_for(lambda: not self._requests, timeout)

    def close(self) -> None:
        """Cancel all requests and end the thread; may be called twice, and from `deliver`."""
        with self._changed:
            self._draining = self._closing = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)

    def _begin(self, submission: Submission) -> None:
        with self._changed:
            self._inbox.append(submission)
            self._changed.notify_all()

    def _is_live(self, submission: Submission) -> bool:
        return self._requests.get(submission.request.id) is submission

    def _run(self) -> None:
        try:
            while self._process_inbox():
                outputs = [] if self.engine.idle else self.engine.step()
                self.steps += 1
                self.beat = time.monotonic()
                self._deliver(outputs)
        except BaseException as error:
            log.critical("the engine died", exc_info=error)
            with self._changed:
                self.failure, self._draining = error, True
            self._end("error", f"the engine died: {type(error).__name__}: {error}")
            return
        for id in list(self._requests):
            self.engine.cancel(id)
        self._end("cancelled", None)

    def _process_inbox(self) -> bool:
        """Wait until there is work, apply submissions and cancellations; False when closing."""
        with self._changed:
            while not (self._inbox or self._closing) and self.engine.idle:
                self.beat = time.monotonic()
                self._changed.wait(HEARTBEAT_SECONDS)
            messages, self._inbox = self._inbox, deque()
            if self._closing:
                return False
        ended: list[Output] = []
        for message in messages:
            if isinstance(message, str):
                if (submission := self._requests.get(message)) is not None:
                    self.engine.cancel(message)
                    ended += submission.end("cancelled", None)
            elif self._is_live(message):
                try:
                    self.engine.begin(message.request)
                    message.held = None
                except InferError as error:  # what `check` could not know
                    ended += message.end("error", *error_fields(error))
        self._deliver(ended)
        return True

    def _deliver(self, outputs: list[Output]) -> None:
        """Deliver outputs of running requests, one call for each `deliver`."""
        batches: dict[Deliver, list[Output]] = {}
        finished = []
        for output in outputs:
            submission = self._requests.get(output.id)
            if submission is None or output.index not in submission.unfinished:
                continue
            batches.setdefault(submission.deliver, []).append(output)
            if output.finish is not None:
                submission.unfinished.discard(output.index)
                if not submission.unfinished:
                    finished.append(output.id)
        for deliver, own in batches.items():
            try:
                deliver(own)
            except Exception:
                log.exception("outputs could not be delivered; their requests are cancelled")
                broken = {output.id for output in own}.difference(finished)
                finished += broken
                if self.failure is None:
                    for id in broken:
                        self.engine.cancel(id)
        if finished:
            with self._changed:
                for id in finished:
                    self._requests.pop(id, None)
                self._changed.notify_all()

    def _end(self, finish: FinishReason, why: str | None) -> None:
        with self._changed:
            self._inbox.clear()
            submissions = list(self._requests.values())
        self._deliver([output for submission in submissions for output in submission.end(finish, why)])
