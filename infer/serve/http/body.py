"""Request and response bodies, and detection of clients that disconnect.

Request bodies are read within limits of size, time, transfer rate, inflated size, and total size of all requests.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, TypeVar

from ...errors import InputError, OverloadedError, TooLargeError, UnsupportedMediaError
from ..limits import ServeLimits
from .connection import ConnectionHandle
from .routing import Response, SlowBodyError

Receive = Callable[[], Awaitable[Any]]
Precheck = Callable[[bytes, bool], None]  # first bytes of the body, True if they are all
INLINE_BYTES = 64 << 10  # larger bodies are inflated in a thread
T = TypeVar("T")
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class ClientGoneError(Exception):
    """Client disconnected; no response can be sent."""


class BodyMemory:
    """Count of the bytes of all request bodies in memory, as they arrive. `limit`, `held`: bytes."""

    def __init__(self, limit: int) -> None:
        self.limit, self.held = limit, 0


class BodyReservation:
    """Bytes of one request in a `BodyMemory`; `close` releases them."""

    def __init__(self, bodies: BodyMemory) -> None:
        self._bodies, self._mine = bodies, 0

    def take(self, size: int) -> None:
        """Reserve bytes. Raises `OverloadedError` when all bodies together would exceed the limit."""
        if self._bodies.held + size > self._bodies.limit:
            raise OverloadedError(f"request bodies in memory exceed the limit of {self._bodies.limit} bytes")
        self._bodies.held += size
        self._mine += size

    def close(self) -> None:
        self._bodies.held -= self._mine
        self._mine = 0


async def read_body(
    receive: Receive,
    headers: Mapping[bytes, bytes],
    limits: ServeLimits,
    share: BodyReservation,
    precheck: Precheck | None = None,
) -> bytes | bytearray:
    """Read and inflate the whole body.

    `precheck`: called with the first bytes of an uncompressed body; may raise to refuse it. Raises `TooLargeError`
    (before reading if Content-Length tells), `SlowBodyError`, `OverloadedError`, `UnsupportedMediaError`,
    `InputError`, `ClientGoneError`.
    """
    length = headers.get(b"content-length")
    if length is None and b"transfer-encoding" not in headers:
        return b""
    if length is not None and int(length) > limits.max_body_bytes:
        raise _too_large(limits)
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding not in (b"identity", b"gzip", b"deflate"):
        raise UnsupportedMediaError("expected content encoding gzip, deflate or identity, got another")
    body = await _collect(receive, limits, share, precheck if encoding == b"identity" else None)
    if encoding == b"identity":
        return body
    if len(body) < INLINE_BYTES:
        plain = _inflate(body, encoding, limits)
    else:
        loop = asyncio.get_running_loop()
        plain = await loop.run_in_executor(None, _inflate, body, encoding, limits)
    share.take(len(plain))
    return plain


async def _collect(
    receive: Receive, limits: ServeLimits, share: BodyReservation, precheck: Precheck | None
) -> bytes | bytearray:
    began = asyncio.get_running_loop().time()
    body: bytes | bytearray = b""
    try:
        async with asyncio.timeout_at(_body_deadline(began, 0, limits)) as alarm:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                data, more = message.get("body", b""), message.get("more_body", False)
                if precheck is not None:
                    precheck(data, not more)
                    precheck = None
                share.take(len(data))
                if not body:
                    body = bytearray(data) if more else data
                else:
                    body += data
                if len(body) > limits.max_body_bytes:
                    raise _too_large(limits)
                if not more:
                    return body
                alarm.reschedule(_body_deadline(began, len(body), limits))
    except TimeoutError as error:
        slow = f"or came at less than {limits.min_bytes_per_second} bytes a second"
        raise SlowBodyError(f"the body did not arrive within {limits.body_seconds:g} s, {slow}") from error


def _body_deadline(began: float, size: int, limits: ServeLimits) -> float:
    """Return the loop time at which a body with `size` bytes received is too late or too slow."""
    rate = limits.min_bytes_per_second
    enough = max(limits.grace_seconds, size / rate) if rate else limits.body_seconds
    return began + min(limits.body_seconds, enough)


def _inflate(body: bytes | bytearray, encoding: bytes, limits: ServeLimits) -> bytes:
    inflater = zlib.decompressobj(wbits=31 if encoding == b"gzip" else 15)
    try:
        plain = inflater.decompress(body, limits.max_body_bytes + 1)
    except zlib.error as error:
        raise InputError(f"expected a valid {encoding.decode()} body") from error
    if len(plain) > limits.max_body_bytes:
        raise _too_large(limits)
    if not inflater.eof or inflater.unused_data:
        raise InputError(f"the {encoding.decode()} body is truncated or followed by other bytes")
    return plain


async def discard(receive: Receive, limits: ServeLimits, *, seconds: float = 1.0) -> None:
    """Read and drop the rest of a body: closing a socket with unread bytes would reset it and lose the response."""
    left = limits.max_body_bytes
    try:
        async with asyncio.timeout(seconds):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def _too_large(limits: ServeLimits) -> TooLargeError:
    return TooLargeError(f"the body is larger than {limits.max_body_bytes} bytes")


async def cancel_on_disconnect(
    work: Awaitable[T], receive: Receive, delay: float, connection: ConnectionHandle | None = None
) -> T:
    """Await `work`; cancel it with `ClientGoneError` when the client disconnects.

    `connection` tells of it. Without one (another ASGI server) `receive` is watched, from `delay` seconds on.
    """
    current, gone = asyncio.current_task(), False

    def leave() -> None:
        nonlocal gone
        gone = True
        if current is not None:
            current.cancel()

    watcher = connection or ReceiveWatcher(receive, delay)
    watcher.watch(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if gone:
            raise ClientGoneError from None
        raise
    finally:
        watcher.unwatch()


class ReceiveWatcher:
    """Watcher for the disconnect message of an ASGI server, with the methods of `ConnectionHandle`."""

    def __init__(self, receive: Receive, delay: float) -> None:
        self._receive, self._delay = receive, delay
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, gone: Callable[[], None]) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._delay, self._begin, gone)

    def unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _begin(self, gone: Callable[[], None]) -> None:
        self._task = asyncio.get_running_loop().create_task(self._wait(gone))

    async def _wait(self, gone: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        gone()


async def send_stream(
    response: Response,
    headers: list[tuple[bytes, bytes]],
    receive: Receive,
    send: Send,
    connection: ConnectionHandle | None = None,
) -> None:
    """Send each part of the stream as one write. Raises `ClientGoneError` if the client leaves.

    One that stops reading is disconnected: see `SlowReaderTimeout`.
    """
    stream = response.stream
    if stream is None:
        return

    async def pump() -> None:
        async for part in stream:
            await send({"type": "http.response.body", "body": part, "more_body": True})

    try:
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        await cancel_on_disconnect(pump(), receive, 0, connection)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
    finally:
        stream.close()
