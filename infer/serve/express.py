"""Requests whose head came before, byte for byte: it is not parsed again, and the answer goes out in one write.

A client that keeps its connection repeats its head with every request, or once per length of body. What parser, limits
and router made of it is kept under its bytes. When such a head comes with its whole body in one read, the endpoint is
called without ASGI in between; everything that a request may say in its body is looked at as ever.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from .framing import Chunked, Counted

if TYPE_CHECKING:
    from .app import App, Endpoint
    from .routing import Reply, Route
    from .wire import Wire

log = logging.getLogger("infer.serve")
CLOSE = b"connection: close\r\n"
MOST_HEADS, LONGEST_HEAD = 1024, 2048  # remembered at a time; bytes
# Heads with one of these are new each time, or ask for what only the whole way does.
RARE = frozenset((b"x-request-id", b"traceparent", b"tracestate", b"expect", b"content-encoding"))


@dataclass(frozen=True, slots=True)
class Known:
    """What a head says. `length`: bytes of the body that follows it."""

    endpoint: Endpoint
    route: Route
    path: Mapping[str, str]
    headers: Mapping[bytes, bytes]
    length: int


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
        if len(self._known) >= MOST_HEADS:
            self._known.clear()
        self._known[head] = Known(endpoint, route, path, headers, body.left)


class Express:
    """One such request under way; stands where uvicorn has its cycle, whose attributes it therefore has."""

    __slots__ = ("_wire", "disconnected", "keep_alive", "response_complete", "response_started", "task")

    def __init__(self, wire: Wire, known: Known, body: bytes) -> None:
        self._wire = wire
        self.keep_alive = True
        self.disconnected = self.response_complete = self.response_started = False
        self.task = task = wire.loop.create_task(self._run(known, body))
        wire.tasks.add(task)
        task.add_done_callback(wire.tasks.discard)

    @property
    def message_event(self) -> Express:
        """uvicorn sets its event when the client has gone, after `disconnected`: nobody waits for the answer then."""
        return self

    def set(self) -> None:
        if self.disconnected:
            self.task.cancel()

    async def _run(self, known: Known, body: bytes) -> None:
        client = self._wire.client
        try:
            await known.endpoint.direct(
                known, body, self, client=client[0] if client else "", over=self._wire.over
            )
        except asyncio.CancelledError:
            if not self.disconnected:  # the server ends, and this with it
                self._wire.transport.close()
                raise
        except Exception:
            log.exception("a request could not be answered")
            self._wire.transport.close()

    async def send(self, reply: Reply, headers: list[tuple[bytes, bytes]]) -> None:
        """The whole answer."""
        wire = self._wire
        if wire.flow.write_paused:
            await wire.flow.drain()
        if self.disconnected:
            return
        lines = [b"%b: %b\r\n" % header for header in (*wire.server_state.default_headers, *headers)]
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
