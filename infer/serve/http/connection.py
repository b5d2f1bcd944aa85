"""Connection: deadlines of request heads, bodies and idle time, flow control, and refusal of bad requests."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import NoReturn

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..limits import ServeLimits
from .message_framing import ChunkedBody, SizedBody, refusal
from .slow_reader import CountingTransport, SlowReaderTimeout

Refused = Callable[[int], None]
LINGER = 1.0  # seconds a refused client may go on sending: closing with unread bytes would lose the refusal
GRACE = 1.0  # seconds after which a late body is refused here, if its route has not done so


class ConnectionFlowControl(FlowControl):
    """uvicorn's flow control; while `blocked`, reading is not resumed until the current response is sent."""

    blocked = False

    def resume_reading(self) -> None:
        if not self.blocked:
            super().resume_reading()


class ConnectionHandle:
    """Connection as the application sees it, in `scope["state"]["connection"]`."""

    def __init__(self, meter: CountingTransport, flow: ConnectionFlowControl) -> None:
        self._meter, self._flow = meter, flow
        self._gone: Callable[[], None] | None = None
        self.lost = False

    def watch(self, gone: Callable[[], None]) -> None:
        """Call `gone` once when the client disconnects, until `unwatch`; at once where it has."""
        self._flow.resume_reading()  # paused after a large body: a closed connection would not be noticed
        if self.lost:
            gone()
        else:
            self._gone = gone

    def unwatch(self) -> None:
        self._gone = None

    def lose(self) -> None:
        """Note that the client disconnected, or is being disconnected."""
        self.lost = True
        gone, self._gone = self._gone, None
        if gone is not None:
            gone()

    @contextlib.contextmanager
    def one_write(self) -> Iterator[None]:
        """Send all that is written inside as one write."""
        self._meter.cork()
        try:
            yield
        finally:
            self._meter.uncork()


class RefusedError(Exception):
    """Raised in a parser callback to end parsing; the parser turns it into an error of its own."""


class Connection(HttpToolsProtocol):
    """Base of `HttpProtocol`: timers and refusals of one connection.

    `_body`: rest of the current body, None in a head; `_head`: bytes of the head so far; `_held`: bytes received after
    a request that is not answered yet; `_idle_since`: loop time since which the connection is idle, infinite while
    it is not.
    """

    limits = ServeLimits()
    refused: Refused = staticmethod(lambda status: None)
    flow: ConnectionFlowControl  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        meter = CountingTransport(transport)
        super().connection_made(meter)  # type: ignore[arg-type]
        self.flow = ConnectionFlowControl(transport)
        self.handle = ConnectionHandle(meter, self.flow)
        self._reader = SlowReaderTimeout(self.loop, meter, self.limits)
        self._body: SizedBody | ChunkedBody | None = None
        self._head, self._held, self._idle_since = 0, b"", math.inf
        self._refusal, self._lingering = HTTPStatus.BAD_REQUEST, False
        self._timer: asyncio.TimerHandle | None = None
        self._arm(self.limits.header_seconds)
        excess = len(self.connections) - self.limits.max_connections
        self.over_limit = excess > 0
        if excess > self.limits.spare_connections:
            self.refused(HTTPStatus.SERVICE_UNAVAILABLE)
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._unset_keepalive_if_required()
        self._reader.end()
        super().connection_lost(exc)
        self.handle.lose()
        self.cycle = None  # type: ignore[assignment]  # a reference cycle: freed now, not by the collector

    @property
    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_idle(self) -> None:
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._wait_for_more(self.timeout_keep_alive)

    def _wait_for_more(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection if it was idle long enough, else set the timer again: one timer serves many requests."""
        self.timeout_keep_alive_task = None
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if math.isinf(left):
            return  # busy: `_start_idle` sets the timer
        if left > 0.001:
            self._wait_for_more(left)
            return
        super().timeout_keep_alive_handler()
        self._reader.begin()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader.begin()

    def _fail_and_close(self, status: HTTPStatus) -> None:
        """Send an error if the current request has no response yet, and close the connection."""
        if self._lingering or self.transport.is_closing():
            return
        self._disarm()
        self._lingering, self._held = True, b""
        answered = self._body is not None and not self._busy
        if self._busy:
            answered = self.cycle.response_started
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self.handle.lose()
        if not answered:
            self.refused(status)
            self.transport.write(refusal(status))
        if answered or not self.transport.can_write_eof():
            self.transport.close()
        else:
            self.transport.write_eof()
            self._timer = self.loop.call_later(LINGER, self.transport.close)
        self._reader.begin()

    def _refuse(self, status: HTTPStatus) -> NoReturn:
        self._refusal = status
        raise RefusedError(status.phrase)

    def _arm(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._on_timeout)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        self._timer = None
        if self._head or self._body is not None:
            self._fail_and_close(HTTPStatus.REQUEST_TIMEOUT)
        else:
            self.transport.close()
