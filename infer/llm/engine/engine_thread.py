"""A thread that runs an engine: requests come from any thread, what each step made goes out in one call."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from ...errors import InferError, InputError, NotReadyError, OverloadedError
from .requests import Output, Request
from .stop_conditions import told

log = logging.getLogger("infer.llm")
Deliver = Callable[[list[Output]], None]
BEAT_SECONDS = 0.5  # between two signs of life of an idle driver
CLOSE_SECONDS = 30.0
MAX_MAIL = 1024  # requests that came since the last step began


class Engine(Protocol):
    """See `infer.llm.engine.engine`; all of it is called on the driver's thread but `check`, which changes nothing."""

    @property
    def idle(self) -> bool: ...

    def check(self, request: Request) -> None:
        """Raise `InputError`, or `OverloadedError`, for what `submit` would refuse."""

    def submit(self, request: Request) -> None: ...

    def cancel(self, id: str) -> object: ...

    def step(self) -> list[Output]: ...

    def stats(self) -> Any: ...


class _Ticket:
    """A request that runs: who gets its outputs, which of its completions are not finished."""

    def __init__(self, request: Request, deliver: Deliver) -> None:
        self.request, self.deliver = request, deliver
        self.unfinished = set(range(request.sampling.n))


class Driver:
    """`beat`: `time.monotonic()` of the last turn of the loop; `steps`: how many steps it ran; `failure`: what the
    engine died of, else None.

    `submit(request, deliver)`: `deliver` is called on the driver's thread, once a step with all outputs of the
    requests that were submitted with it; every completion ends with an `Output` whose `finish` is set, also when it
    is cancelled or the engine dies.
    """

    def __init__(self, engine: Any, *, name: str = "engine") -> None:
        self.engine: Engine = engine
        self.failure: BaseException | None = None
        self.beat, self.steps = time.monotonic(), 0
        self._changed = threading.Condition()
        self._mail: deque[tuple[str, _Ticket | None]] = deque()  # (id, None): cancel it
        self._late: deque[_Ticket] = deque()
        self._known: set[str] = set()  # submitted and not finished
        self._running: dict[str, _Ticket] = {}  # of the loop's own
        self._draining = self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"infer {name}", daemon=True)
        self._thread.start()

    def submit(self, request: Request, deliver: Deliver) -> None:
        """Raises `InputError` or `OverloadedError` as the engine's `check` does, `NotReadyError` once draining."""
        self.engine.check(request)
        with self._changed:
            if self.failure is not None:
                raise NotReadyError(f"the engine died: {self.failure}") from self.failure
            if self._draining:
                raise NotReadyError("the engine is stopping")
            if len(self._mail) >= MAX_MAIL:
                raise OverloadedError(f"{len(self._mail)} requests came at once")
            if request.id in self._known:
                raise InputError(f"a request named {request.id!r} is running", where="id")
            self._known.add(request.id)
            self._mail.append((request.id, _Ticket(request, deliver)))
            self._changed.notify_all()

    def cancel(self, id: str) -> None:
        """Ends a request at the next step; no error when it is finished or unknown."""
        with self._changed:
            if id in self._known:
                self._mail.append((id, None))
                self._changed.notify_all()

    @property
    def running(self) -> int:
        """Requests that were submitted and are not finished."""
        return len(self._known)

    def stats(self) -> Any:
        """The engine's, as they are in the middle of whatever it does."""
        return self.engine.stats()

    def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests and wait until those there are done; False when `timeout` seconds were not enough."""
        with self._changed:
            self._draining = True
            return self._changed.wait_for(lambda: not self._known, timeout)

    def close(self) -> None:
        """Cancel what runs and end the thread; may be called twice, and by `deliver`."""
        with self._changed:
            self._draining = self._closing = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            while self._read_mail():
                outputs = [] if self.engine.idle else self.engine.step()
                self.steps += 1
                self.beat = time.monotonic()
                self._send([o for o in outputs if o.id in self._running])
        except BaseException as error:
            log.critical("the engine died", exc_info=error)
            self._die(error)
            return
        for id in self._running:
            self.engine.cancel(id)
        self._end("cancelled", None)

    def _read_mail(self) -> bool:
        """Wait until there is something to do, apply what came; False when closing."""
        with self._changed:
            while not (self._mail or self._late or self._closing) and self.engine.idle:
                self.beat = time.monotonic()
                self._changed.wait(BEAT_SECONDS)
            mail, self._mail = self._mail, deque()
            if self._closing:
                self._running |= {id: ticket for id, ticket in mail if ticket is not None}
                return False
        ended: list[Output] = []
        for id, ticket in mail:
            if ticket is not None:
                self._running[id] = ticket
                self._late.append(ticket)
            elif id in self._running:
                self.engine.cancel(id)
                ended += _endings(self._running[id], "cancelled", None)
        self._send(ended)
        self._send(self._admit())
        return True

    def _admit(self) -> list[Output]:
        """Hand requests to the engine; those that came together and are too many for it wait for the next turn."""
        ended: list[Output] = []
        while self._late:
            request = self._late[0].request
            if self._running.get(request.id) is self._late[0]:
                try:
                    self.engine.submit(request)
                except OverloadedError:
                    break
                except InferError as error:  # what `check` could not know
                    ended += _endings(self._late[0], "error", *told(error))
            self._late.popleft()
        return ended

    def _send(self, outputs: list[Output]) -> None:
        """Outputs of running requests, one call for each `deliver`."""
        letters: dict[Deliver, list[Output]] = {}
        finished = []
        for output in outputs:
            ticket = self._running.get(output.id)
            if ticket is None:
                continue
            letters.setdefault(ticket.deliver, []).append(output)
            if output.finish is not None:
                ticket.unfinished.discard(output.index)
                if not ticket.unfinished:
                    finished.append(output.id)
                    del self._running[output.id]
        for deliver, own in letters.items():
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

    def _die(self, error: BaseException) -> None:
        with self._changed:
            self.failure, self._draining = error, True
            self._running |= {id: ticket for id, ticket in self._mail if ticket is not None}
            self._mail.clear()
        self._end("error", f"the engine died: {type(error).__name__}: {error}")

    def _end(self, finish: Any, why: str | None) -> None:
        self._send([o for ticket in self._running.values() for o in _endings(ticket, finish, why)])


def _endings(ticket: _Ticket, finish: Any, why: str | None, fault: str = "") -> list[Output]:
    id = ticket.request.id
    return [
        Output(id=id, index=i, finish=finish, stopped_by=why, fault=fault) for i in sorted(ticket.unfinished)
    ]
