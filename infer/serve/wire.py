"""What uvicorn leaves open: heads bounded in bytes, number and time; refusals in JSON, then close."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .limits import ServeLimits


class RefusedError(Exception):
    """Raised inside the parser's callbacks; the parser makes its own error of it, and that is answered."""


def protocol(limits: ServeLimits) -> type[HttpToolsProtocol]:
    """The connection class that keeps `limits`."""
    return type("LimitedProtocol", (Wire,), {"limits": limits})


class Wire(HttpToolsProtocol):
    """One connection. `_open` while the head of a request is arriving, `_head` its bytes so far."""

    limits = ServeLimits()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._open, self._head = True, 0
        self._refusal = HTTPStatus.BAD_REQUEST
        self._timer: asyncio.TimerHandle | None = None
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._open:
            self._head += len(data)
        super().data_received(data)
        if not self._open or self.transport.is_closing():
            return
        if self._head > self.limits.max_header_bytes:
            self._refusal = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            self.send_400_response("")
        elif self._head and self._timer is None:
            self._arm()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self.limits.max_target_bytes:
            self._refuse(HTTPStatus.REQUEST_URI_TOO_LONG)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > self.limits.max_headers:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def on_headers_complete(self) -> None:
        self._open, self._head = False, 0
        self._disarm()
        size = sum(len(name) + len(value) for name, value in self.headers)
        if size > self.limits.max_header_bytes:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        lengths = [value for name, value in self.headers if name == b"content-length"]
        if len(lengths) > 1 or (lengths and not lengths[0].isdigit()):
            self._refuse(HTTPStatus.BAD_REQUEST)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._open = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Whatever was refused, in JSON, and the end of the connection."""
        if self.transport.is_closing():
            return
        body = msgspec.json.encode({"error": self._refusal.phrase})
        head = f"HTTP/1.1 {self._refusal.value} {self._refusal.phrase}\r\ncontent-type: application/json\r\n"
        tail = f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + tail.encode() + body)
        self.transport.close()

    def _refuse(self, status: HTTPStatus) -> None:
        self._refusal = status
        raise RefusedError(status.phrase)

    def _arm(self) -> None:
        self._timer = self.loop.call_later(self.limits.header_seconds, self._late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self._head:
            self._refusal = HTTPStatus.REQUEST_TIMEOUT
            self.send_400_response("")
        else:
            self.transport.close()


def options(limits: ServeLimits) -> dict[str, Any]:
    """For `uvicorn.Config`."""
    return {
        "http": protocol(limits),
        "ws": "none",
        "lifespan": "off",
        "access_log": False,
        "log_config": None,
        "server_header": False,
        "proxy_headers": False,
        "limit_concurrency": limits.max_connections,
        "timeout_keep_alive": limits.keep_alive_seconds,
    }
