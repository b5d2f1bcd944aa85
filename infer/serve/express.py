"""Requests whose head came before, byte for byte: it is not parsed again, and the answer goes out in one write.

A client that keeps its connection repeats its head with every request, or once per length of body. What parser, limits
and router made of it is kept under its bytes. When such a head comes with its whole body in one read, the endpoint is
called without ASGI in between; everything that a request may say in its body is looked at as ever.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from ..errors import InferError, InputError, ServeError
from .body import Share
from .framing import Chunked, Counted
from .routing import CLIENT_GONE, Reply, Route, Together, allowed
from .tickets import Answer, Ticket

if TYPE_CHECKING:
    from .app import App, Endpoint
    from .service import Service
    from .wire import Wire

log = logging.getLogger("infer.serve")
CLOSE = b"connection: close\r\n"
MOST_HEADS, LONGEST_HEAD = 1024, 2048  # remembered at a time; bytes
SMALL_BODY = 16 << 10  # bytes that are read as soon as the queue is asked whether it would take them
# Heads with one of these are new each time, or ask for what only the whole way does.
RARE = frozenset((b"x-request-id", b"traceparent", b"tracestate", b"expect", b"content-encoding"))


class Group(Protocol):
    """Requests that are under way together."""

    def reply(self, request: Express, answer: Answer) -> Reply: ...

    def withdraw(self, request: Express) -> None: ...

    def end(self, request: Express) -> None: ...


@dataclass(frozen=True, slots=True)
class Known:
    """What a head says. `length`: bytes of the body that follows it; `timeout`: seconds; `together`: of the route,
    None where the head has no right to it."""

    endpoint: Endpoint
    route: Route
    path: Mapping[str, str]
    headers: Mapping[bytes, bytes]
    length: int
    timeout: float
    together: Together | None


class Heads:
    """Those of requests that were well formed, by their bytes; all are forgotten when they become too many."""

    def __init__(self) -> None:
        self._known: dict[bytes, Known] = {}
        self.get = self._known.get

    def learn(self, head: bytes, wire: Wire, body: Counted | Chunked | None, *, keep_alive: bool) -> None:
        """Keep it if requests like it can be answered in one piece."""
        if len(head) > LONGEST_HEAD or not isinstance(body, Counted) or not keep_alive:
            return
        headers, scope = dict(wire.headers), wire.scope
        if scope["method"] != "POST" or not RARE.isdisjoint(headers):
            return
        app: App = wire.app  # type: ignore[assignment]
        found = app.find(scope)  # type: ignore[arg-type]
        if found is None or body.left > app.service.limits.max_body_bytes:
            return
        endpoint, route, path = found
        service = app.service
        try:
            timeout = allowed(headers) or service.limits.timeout_seconds
        except InputError:
            return
        admitted = route.open or service.keys is None or service.keys.admit(headers)
        if len(self._known) >= MOST_HEADS:
            self._known.clear()
        self._known[head] = Known(
            endpoint, route, path, headers, body.left, timeout, route.together if admitted else None
        )


class Express(Ticket):
    """One such request under way; stands where uvicorn has its cycle, whose attributes it therefore has.

    It goes with others in a `group`, or alone, as a task.
    """

    __slots__ = (
        *("_wire", "began", "call", "disconnected", "group", "keep_alive", "known"),
        *("response_complete", "response_started", "share", "task"),
    )

    def __init__(self, wire: Wire, known: Known, body: bytes) -> None:
        super().__init__()
        self._wire, self.known = wire, known
        self.began, self.keep_alive = time.perf_counter(), True
        self.disconnected = self.response_complete = self.response_started = False
        self.task: asyncio.Task[None] | None = None
        self.group: Group | None = None
        endpoint, client = known.endpoint, wire.client
        self.call = endpoint.call(known, body, client[0] if client else "")
        self.share = Share(endpoint.bodies)
        endpoint.service.active += 1
        if known.together is None or wire.over or len(body) > SMALL_BODY:
            self.alone()
        else:
            endpoint.convoy.join(self)

    @property
    def message_event(self) -> Express:
        """uvicorn sets its event when the client has gone, after `disconnected`: nobody waits for the answer then."""
        return self

    def set(self) -> None:
        if not self.disconnected or self.response_complete:
            return
        if self.task is not None:
            self.task.cancel()
        elif not self.settled:
            self.settled = True
            if self.group is not None:
                self.group.withdraw(self)
            self._end(CLIENT_GONE)

    def alone(self) -> None:
        self.share.close()
        self._start(self._ask())

    def tell(self, outcome: Answer | Exception) -> None:
        endpoint, call = self.known.endpoint, self.call
        try:
            if isinstance(outcome, Exception):
                reply = endpoint.failed(call, outcome)
            elif self.group is None:
                raise InferError("a request was answered that went with no others")
            else:
                reply = self.group.reply(self, outcome)
        except Exception as error:  # noqa: BLE001 - whatever it was, this request alone ends
            reply = endpoint.failed(call, error)
        if self._wire.flow.write_paused:
            self._start(self._answer(reply))
        else:
            try:
                self._send(reply)
            except Exception:
                log.exception("a request could not be answered")
                self._wire.transport.close()
            self._end(reply.status)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        wire = self._wire
        self.task = task = wire.loop.create_task(self._run(work))
        wire.tasks.add(task)
        task.add_done_callback(wire.tasks.discard)

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except asyncio.CancelledError:
            self._end(CLIENT_GONE)
            if not self.disconnected:  # the server ends, and this with it
                self._wire.transport.close()
                raise
        except Exception:
            log.exception("a request could not be answered")
            self._wire.transport.close()
            self._end(500)

    async def _ask(self) -> None:
        await self._answer(await self.known.endpoint.direct(self.call, self.share, over=self._wire.over))

    async def _answer(self, reply: Reply) -> None:
        if self._wire.flow.write_paused:
            await self._wire.flow.drain()
        if not self.disconnected:
            self._send(reply)
        self._end(reply.status)

    def _end(self, status: int) -> None:
        """Count it, and let go of all it holds."""
        endpoint, call = self.known.endpoint, self.call
        endpoint.count(call, status, self.began)
        endpoint.service.active -= 1
        self.share.close()
        # A connection at rest has this as its last request: tracebacks refer back, answers are views of shared memory.
        call.error, call.measure, call.body = None, None, b""
        self.entries = []
        if self.group is not None:
            self.group.end(self)
            self.group = None

    def _send(self, reply: Reply) -> None:
        """The whole answer."""
        wire = self._wire
        defaults = wire.server_state.default_headers
        lines = [b"%b: %b\r\n" % header for header in (*defaults, *reply.head(self.call, over=wire.over))]
        if CLOSE in lines:
            self.keep_alive = False
        elif not self.keep_alive:
            lines.append(CLOSE)
        lines.append(b"content-length: %d\r\n" % len(reply.body))
        head = b"".join(lines)
        if head.count(b"\n") != len(lines):
            raise ValueError("a line break in a header of an answer")
        self.response_started = self.response_complete = True
        wire.transport.write(b"".join((STATUS_LINE[reply.status], head, b"\r\n", reply.body)))
        if not self.keep_alive:
            wire.transport.close()
        wire.on_response_complete()


class Convoy:
    """Requests that go together: those that come in one turn of the event loop."""

    def __init__(self, service: Service) -> None:
        self._service, self._waiting = service, list[Express]()

    def join(self, request: Express) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._go)
        self._waiting.append(request)

    def _go(self) -> None:
        came, self._waiting = self._waiting, []
        groups: dict[Together, list[Express]] = {}
        for request in came:
            if request.settled:
                continue
            try:
                self._service.require_ready()
                request.share.take(len(request.call.body))
            except ServeError:  # which it is told on the other way
                request.alone()
                continue
            if request.known.together is not None:
                groups.setdefault(request.known.together, []).append(request)
        for together, requests in groups.items():
            try:
                alone = together(self._service, requests)
            except Exception:
                log.exception("requests could not go together")
                alone = [request for request in requests if not request.entries]
            for request in alone:
                request.alone()
