"""What uvicorn leaves open: heads, bodies and readers bounded in bytes, number and time; refusals in JSON."""

from __future__ import annotations

import asyncio
import math
import re
import ssl
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NoReturn

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .express import Express
from .framing import HEAD_END, Chunked, Counted, FramingError, Seam, announced, refusal
from .heads import Heads
from .hosts import Hosts
from .limits import ServeLimits
from .readers import Flow, Meter, Watch
from .tls import Gate

Refused = Callable[[int], None]
LINGER = 1.0  # seconds a refused client may go on sending: closing on unread bytes would destroy the refusal
GRACE = 1.0  # seconds after which a late body is refused here, should nobody have said so in its dialect
ONCE = frozenset(
    (
        *(b"host", b"content-length", b"transfer-encoding", b"content-type", b"content-encoding"),
        *(b"authorization", b"x-api-key", b"inference-header-content-length"),
        *(b"x-request-timeout-ms", b"x-request-id"),
    )
)


# Hidden from the parser, which would take the body of such a request for another protocol, or another request.
UPGRADE = re.compile(rb"(\r\n)upgrade(?=:)", re.IGNORECASE)


class RefusedError(Exception):
    """Raised inside the parser's callbacks; the parser makes its own error of it, and that is answered."""


class Wire(HttpToolsProtocol):
    """One connection. Requests that follow an unanswered one are held back unparsed, so answers keep their order.

    `_body` is what remains of the current message, None in its head; `_head` counts the bytes of that. `_whole` is the
    head that is being parsed, if it came in one piece. `_rested`: since when nothing is asked, infinite while something
    is. `heads`: those that any connection of this server has seen.
    """

    limits = ServeLimits()
    heads = Heads()
    hosts: Hosts | None = None  # None: any
    refused: Refused = staticmethod(lambda status: None)
    flow: Flow  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        meter = Meter(transport)
        super().connection_made(meter)  # type: ignore[arg-type]
        self.flow = Flow(transport)
        self._reader = Watch(self.loop, meter, self.limits)
        self._body: Counted | Chunked | None = None
        self._head, self._held, self._seam = 0, b"", Seam()
        self._whole, self._rested = b"", math.inf
        self._refusal, self._lingering = HTTPStatus.BAD_REQUEST, False
        self._timer: asyncio.TimerHandle | None = None
        self._arm(self.limits.header_seconds)
        crowd = len(self.connections) - self.limits.max_connections
        self.over = crowd > 0
        if crowd > self.limits.spare_connections:
            self.refused(HTTPStatus.SERVICE_UNAVAILABLE)
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._unset_keepalive_if_required()
        self._reader.end()
        super().connection_lost(exc)
        self.cycle = None  # type: ignore[assignment]  # it refers back: who is freed at once needs no collector

    def data_received(self, data: bytes) -> None:
        if self._lingering or self.transport.is_closing():
            return
        self._rested = math.inf
        if self._held:
            self._held += data
        elif self._head or self._body is not None or not self._ride(data):
            self._eat(data)

    def _ride(self, data: bytes) -> bool:
        """Whether it was one request, whole, with a known head."""
        end = data.find(HEAD_END) + len(HEAD_END)
        known = self.heads.get(data[:end])
        if known is None or len(data) != end + known.length or self._busy:
            return False
        self._disarm()
        self.cycle = Express(self, known, data[end:])  # type: ignore[assignment]
        return True

    def _eat(self, data: bytes) -> None:
        """Feed the parser head by head and body by body."""
        at = 0
        while at < len(data) and not self._lingering:
            body = self._body
            if body is not None:
                try:
                    end = body.reach(data, at)
                except FramingError:
                    self._give_up(HTTPStatus.BAD_REQUEST)
                    return
                self._feed(data[at:end])
                if body.done != (self._body is not body):
                    self._give_up(HTTPStatus.BAD_REQUEST)  # the parser sees another end than we
            elif self._busy:
                self._held, self.flow.blocked = data[at:], True
                self.flow.pause_reading()
                return
            else:
                end = self._seam.reach(data, at)
                head = data[at:end]
                if not self._head and head.endswith(HEAD_END):
                    known = self.heads.get(head)
                    if known is not None and len(data) - end >= known.length:
                        if self._timer is not None:
                            self._disarm()
                        at = end + known.length
                        self.cycle = Express(self, known, data[end:at])  # type: ignore[assignment]
                        continue
                    self._whole = head
                self._head += end - at
                if self._timer is None:
                    self._arm(self.limits.header_seconds)
                self._feed(UPGRADE.sub(rb"\1X-grade", head))
                self._whole = b""
                if self._head > self.limits.max_header_bytes:
                    self._give_up(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            at = end

    @property
    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._give_up(self._refusal)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self.limits.max_target_bytes:
            self._refuse(HTTPStatus.REQUEST_URI_TOO_LONG)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._body is not None:
            return  # a trailer: it came too late to mean anything
        super().on_header(name, value)
        if len(self.headers) > self.limits.max_headers:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def on_headers_complete(self) -> None:
        if sum(len(name) + len(value) for name, value in self.headers) > self.limits.max_header_bytes:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        if self.parser.should_upgrade():  # with CONNECT, or with a header that came in two pieces
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
            body = announced(headers, version, self.limits)
        except FramingError:
            self._refuse(HTTPStatus.BAD_REQUEST)
        self.scope["state"]["over"] = self.over  # type: ignore[typeddict-item]
        super().on_headers_complete()
        self._disarm()
        self._head, self._body = 0, body
        if self._whole:
            self.heads.learn(self._whole, self, body, keep_alive=self.cycle.keep_alive)
        if body is not None:
            self._arm(self.limits.body_seconds + GRACE)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._body, self._head = None, 0
        self._disarm()
        if not self._busy:  # it was answered before it was complete
            self._rest()

    def on_response_complete(self) -> None:
        """uvicorn's would start what it had parsed of the next requests, which is nothing, and a timer each time."""
        self.server_state.total_requests += 1
        self._reader.begin()
        if self.transport.is_closing():
            return
        self.flow.blocked = False
        if self.flow.read_paused:
            self.flow.resume_reading()
        if self._held:
            held, self._held = self._held, b""
            self._eat(held)
        else:
            self._rest()

    def _rest(self) -> None:
        self._rested = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._wait_for_more(self.timeout_keep_alive)

    def _wait_for_more(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        """One timer looks at many rests: when the last of them began."""
        self.timeout_keep_alive_task = None
        left = self._rested + self.timeout_keep_alive - self.loop.time()
        if math.isinf(left):
            return  # not at rest: the next one starts a timer
        if left > 0.001:
            self._wait_for_more(left)
            return
        super().timeout_keep_alive_handler()
        self._reader.begin()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader.begin()

    def send_400_response(self, msg: str) -> None:
        self._give_up(self._refusal)

    def _give_up(self, status: HTTPStatus) -> None:
        """Refuse in JSON what has no answer yet, and close the connection."""
        if self._lingering or self.transport.is_closing():
            return
        self._disarm()
        self._lingering, self._held = True, b""
        answered = self._body is not None and not self._busy
        if self._busy:
            answered = self.cycle.response_started
            self.cycle.disconnected = True
            self.cycle.message_event.set()
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
        self._timer = self.loop.call_later(seconds, self._late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self._head or self._body is not None:
            self._give_up(HTTPStatus.REQUEST_TIMEOUT)
        else:
            self.transport.close()


def protocol(limits: ServeLimits, refused: Refused | None = None, hosts: Hosts | None = None) -> type[Wire]:
    """The connection class that keeps `limits`; `refused` is told the status of what it refuses itself."""
    own = {
        "limits": limits,
        "heads": Heads(),
        "hosts": hosts,
        "refused": staticmethod(refused or Wire.refused),
    }
    return type("LimitedWire", (Wire,), own)


def options(
    limits: ServeLimits,
    refused: Refused | None = None,
    tls: ssl.SSLContext | None = None,
    hosts: Hosts | None = None,
) -> dict[str, Any]:
    """For `uvicorn.Config`."""
    wire = protocol(limits, refused, hosts)

    def gate(**given: Any) -> asyncio.BaseProtocol:
        return wire(**given) if tls is None else Gate(wire(**given), tls)

    return {
        "http": gate,
        "ws": "none",
        "lifespan": "off",
        "access_log": False,
        "log_config": None,
        "server_header": False,
        "proxy_headers": False,
        "timeout_keep_alive": limits.keep_alive_seconds,
    }
