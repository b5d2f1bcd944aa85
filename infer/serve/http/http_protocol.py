"""HTTP/1.1 protocol on top of uvicorn's: deadlines and limits of heads and bodies, one request at a time, fast path."""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NoReturn, Protocol

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..limits import ServeLimits
from .access_control import AllowedHosts
from .connection import ConnectionFlowControl, ConnectionHandle, CountingTransport, SlowReaderTimeout
from .listener import TlsHandshake
from .message_framing import (
    HEAD_END,
    ChunkedBody,
    FramingError,
    HeadFilter,
    HeadScanner,
    SizedBody,
    body_framing,
    refusal,
)

Refused = Callable[[int], None]
LINGER = 1.0  # seconds a refused client may go on sending: closing with unread bytes would lose the refusal
GRACE = 1.0  # seconds after which a late body is refused here, if its route has not done so
ONCE = frozenset(
    (
        *(b"host", b"content-length", b"transfer-encoding", b"content-type", b"content-encoding"),
        *(b"authorization", b"x-api-key", b"inference-header-content-length"),
        *(b"x-request-timeout-ms", b"x-request-id"),
    )
)


class RefusedError(Exception):
    """Raised in a parser callback to end parsing; the parser turns it into an error of its own."""


class FastPath(Protocol):
    """Handler of some requests without parser and ASGI, whose heads begin with `start`; others are parsed."""

    start: bytes

    def learn(self, connection: HttpProtocol, head: bytes, length: int) -> None:
        """Learn the head of a well-formed keep-alive request whose body has `length` bytes.

        `connection` holds its `headers` and `scope`.
        """

    def take(self, connection: HttpProtocol, head: bytes, data: bytes, start: int) -> int:
        """Start the request whose body begins at `start` of `data`; return the end of the body, or 0 if not taken.

        A request that is taken is in `connection.cycle` until it is answered or given to `connection.resume`.
        """


class HttpProtocol(HttpToolsProtocol):
    """One connection. Pipelined requests are held back unparsed until the one before is answered.

    `fast`: fast path, None for none; `hosts`: accepted Host headers, None for any; `_body`: rest of the current body,
    None in a head; `_head`: bytes of the head so far; `_whole`: head being parsed, if it arrived in one piece and
    begins as those of the fast path; `_held`: bytes received after a request that is not answered yet; `_idle_since`:
    loop time since which the connection is idle, infinite while it is not.
    """

    limits = ServeLimits()
    refused: Refused = staticmethod(lambda status: None)
    fast: FastPath | None = None
    hosts: AllowedHosts | None = None
    flow: ConnectionFlowControl  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._head_scanner, self._head_filter, self._whole = HeadScanner(), HeadFilter(), b""
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

    def data_received(self, data: bytes) -> None:
        if self._lingering or self.transport.is_closing():
            return
        self._idle_since = math.inf
        if self._held:
            self._held += data
        else:
            self._consume(data, self.fast)

    def resume(self, data: bytes, *, keep_alive: bool) -> None:
        """Parse a whole request that the fast path took but cannot answer."""
        self.cycle = None  # type: ignore[assignment]
        if not self.transport.is_closing():
            self._consume(data)
            if self._busy and not keep_alive:
                self.cycle.keep_alive = False

    def _consume(self, data: bytes, fast: FastPath | None = None) -> None:
        """Feed the parser one head or body at a time, except requests that the fast path takes."""
        at = 0
        while at < len(data) and not self._lingering:
            body = self._body
            if body is not None:
                try:
                    end = body.end(data, at)
                except FramingError:
                    self._fail_and_close(HTTPStatus.BAD_REQUEST)
                    return
                self._feed(data[at:end])
                if body.done != (self._body is not body):
                    self._fail_and_close(
                        HTTPStatus.BAD_REQUEST
                    )  # the parser disagrees about the end of the body
            elif self._busy:
                self._held, self.flow.blocked = data[at:], True
                self.flow.pause_reading()
                return
            else:
                end = self._head_scanner.end(data, at)
                head = data[at:end]
                if self._is_fast(head):
                    if fast is not None and (after := fast.take(self, head, data, end)):
                        self._disarm()
                        at = after
                        continue
                    self._whole = head
                if not self._head:
                    self._head_filter.begin()
                self._head += end - at
                if self._timer is None:
                    self._arm(self.limits.header_seconds)
                try:
                    self._feed(self._head_filter.pass_on(head))
                except FramingError:
                    self._fail_and_close(HTTPStatus.BAD_REQUEST)
                    return
                self._whole = b""
                if self._head > self.limits.max_header_bytes:
                    self._fail_and_close(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            at = end

    def _is_fast(self, head: bytes) -> bool:
        """Return True for a whole head that begins as those of the fast path."""
        start = b"" if self.fast is None or self._head else self.fast.start
        return bool(start) and head.startswith(start) and head.endswith(HEAD_END)

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail_and_close(self._refusal)

    def send_400_response(self, msg: str) -> None:
        self._fail_and_close(self._refusal)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self.limits.max_target_bytes:
            self._refuse(HTTPStatus.REQUEST_URI_TOO_LONG)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._body is not None:
            return  # a trailer: ignored
        super().on_header(name, value)
        if len(self.headers) > self.limits.max_headers:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def on_headers_complete(self) -> None:
        if sum(len(name) + len(value) for name, value in self.headers) > self.limits.max_header_bytes:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        if self.parser.should_upgrade():  # with CONNECT
            self._refuse(HTTPStatus.BAD_REQUEST)
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            self._refuse(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
        named = [name for name, _ in self.headers if name in ONCE]
        if len(named) != len(set(named)) or (version == "1.1" and b"host" not in named):
            self._refuse(HTTPStatus.BAD_REQUEST)
        headers = dict(self.headers)
        if self.hosts is not None and not self.hosts.admit(headers.get(b"host", b"localhost")):
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST)
        try:
            body = body_framing(headers, version, self.limits)
        except FramingError:
            self._refuse(HTTPStatus.BAD_REQUEST)
        self.scope["state"].update(over_limit=self.over_limit, connection=self.handle)  # type: ignore[typeddict-item]
        super().on_headers_complete()
        self._disarm()
        self._head, self._body = 0, body
        if self.fast is not None and self._whole and isinstance(body, SizedBody) and self.cycle.keep_alive:
            self.fast.learn(self, self._whole, body.left)
        if body is not None:
            self._arm(self.limits.body_seconds + GRACE)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._body, self._head = None, 0
        self._disarm()
        if not self._busy:  # answered before it was complete
            self._start_idle()

    def on_response_complete(self) -> None:
        """Continue with held-back bytes, or go idle. Replaces uvicorn's, which sets a timer for each response."""
        self.server_state.total_requests += 1
        self._reader.begin()
        if self.transport.is_closing():
            return
        self.flow.blocked = False
        if self.flow.read_paused:
            self.flow.resume_reading()
        if self._held:
            held, self._held = self._held, b""
            self._consume(held, self.fast)
        else:
            self._start_idle()


def uvicorn_options(
    limits: ServeLimits,
    refused: Refused | None = None,
    tls: ssl.SSLContext | None = None,
    hosts: AllowedHosts | None = None,
    fast: FastPath | None = None,
) -> dict[str, Any]:
    """Return the keyword arguments of `uvicorn.Config`.

    `refused`: called with the status of each refusal of the protocol's own.
    """
    own: dict[str, Any] = {"limits": limits, "hosts": hosts, "fast": fast}
    own["refused"] = staticmethod(refused or HttpProtocol.refused)
    protocol = type("LimitedHttpProtocol", (HttpProtocol,), own)

    def make(**given: Any) -> asyncio.BaseProtocol:
        return protocol(**given) if tls is None else TlsHandshake(protocol(**given), tls)

    return {
        "http": make,
        "ws": "none",
        "lifespan": "off",
        "access_log": False,
        "log_config": None,
        "server_header": False,
        "proxy_headers": False,
        "timeout_keep_alive": limits.keep_alive_seconds,
    }
