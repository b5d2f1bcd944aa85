"""HTTP/1.1 protocol on top of uvicorn's: limits of heads and bodies, one request at a time, optional fast path."""

from __future__ import annotations

import asyncio
import math
import ssl
from http import HTTPStatus
from typing import Any, Protocol

import httptools

from ..limits import ServeLimits
from .access_control import AllowedHosts
from .connection import GRACE, Connection, Refused
from .listener import TlsHandshake
from .message_framing import HEAD_END, FramingError, HeadFilter, HeadScanner, SizedBody, body_framing

ONCE = frozenset(
    (
        *(b"host", b"content-length", b"transfer-encoding", b"content-type", b"content-encoding"),
        *(b"authorization", b"x-api-key", b"inference-header-content-length"),
        *(b"x-request-timeout-ms", b"x-request-id"),
    )
)


class FastPath(Protocol):
    """Handler of some requests without parser and ASGI. Requests that it does not take are parsed."""

    def learn(self, connection: HttpProtocol, head: bytes, length: int) -> None:
        """Learn the head of a well-formed keep-alive request whose body has `length` bytes.

        `connection` holds its `headers` and `scope`.
        """

    def take(self, connection: HttpProtocol, head: bytes, data: bytes, start: int) -> int:
        """Start the request whose body begins at `start` of `data`; return the end of the body, or 0 if not taken.

        A request that is taken is in `connection.cycle` until it is answered or given to `connection.resume`.
        """


class HttpProtocol(Connection):
    """One connection. Pipelined requests are held back unparsed until the one before is answered.

    `_whole`: head being parsed, if it arrived in one piece; `fast`: fast path, None for none.
    """

    fast: FastPath | None = None
    hosts: AllowedHosts | None = None  # None: any

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._head_scanner, self._head_filter, self._whole = HeadScanner(), HeadFilter(), b""
        super().connection_made(transport)

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
                if not self._head and head.endswith(HEAD_END):
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


def limited_protocol(
    limits: ServeLimits,
    refused: Refused | None = None,
    hosts: AllowedHosts | None = None,
    fast: FastPath | None = None,
) -> type[HttpProtocol]:
    """Return the connection class with these limits. `refused`: called with the status of each refusal of its own."""
    own = {
        "limits": limits,
        "fast": fast,
        "hosts": hosts,
        "refused": staticmethod(refused or HttpProtocol.refused),
    }
    return type("LimitedHttpProtocol", (HttpProtocol,), own)


def uvicorn_options(
    limits: ServeLimits,
    refused: Refused | None = None,
    tls: ssl.SSLContext | None = None,
    hosts: AllowedHosts | None = None,
    fast: FastPath | None = None,
) -> dict[str, Any]:
    """Return the keyword arguments of `uvicorn.Config`."""
    protocol = limited_protocol(limits, refused, hosts, fast)

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
