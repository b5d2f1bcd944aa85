"""Reading a request body: bounded in bytes, in time and in speed, again after inflating, and over all requests."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ...errors import InputError, OverloadedError, TooLargeError, UnsupportedMediaError
from ..limits import ServeLimits
from .routing import SlowBodyError

Receive = Callable[[], Awaitable[Any]]
Precheck = Callable[[bytes, bool], None]  # the first piece, whether it is all
INLINE_BYTES = 64 << 10  # more is inflated in a thread


class ClientGoneError(Exception):
    """The client hung up before its request was complete; nobody is left to be told."""


class BodyMemory:
    """Bytes of all bodies that are in memory; counted as they arrive, not as they are announced."""

    def __init__(self, limit: int) -> None:
        self.limit, self.held = limit, 0


class BodyReservation:
    """What one request holds of them; `close` gives it back."""

    def __init__(self, bodies: BodyMemory) -> None:
        self._bodies, self._mine = bodies, 0

    def take(self, size: int) -> None:
        """Raises `OverloadedError` when all bodies together would be too large."""
        if self._bodies.held + size > self._bodies.limit:
            raise OverloadedError("too many bytes of requests are in memory")
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
    early: Precheck | None = None,
) -> bytes | bytearray:
    """The whole body, inflated. Raises `TooLargeError` (before reading where the length is given),
    `SlowBodyError`, `OverloadedError`, `UnsupportedMediaError`, `InputError`, `ClientGoneError`, and what `early`
    raises when the first piece of a plain body has come."""
    length = headers.get(b"content-length")
    if length is None and b"transfer-encoding" not in headers:
        return b""
    if length is not None and int(length) > limits.max_body_bytes:
        raise _too_large(limits)
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding not in (b"identity", b"gzip", b"deflate"):
        raise UnsupportedMediaError("this content encoding is not taken", hint="Use gzip, deflate or none")
    body = await _collect(receive, limits, share, early if encoding == b"identity" else None)
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
    receive: Receive, limits: ServeLimits, share: BodyReservation, early: Precheck | None
) -> bytes | bytearray:
    began = asyncio.get_running_loop().time()
    body: bytes | bytearray = b""
    try:
        async with asyncio.timeout_at(_due(began, 0, limits)) as alarm:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                piece, more = message.get("body", b""), message.get("more_body", False)
                if early is not None:
                    early(piece, not more)
                    early = None
                share.take(len(piece))
                if not body:
                    body = bytearray(piece) if more else piece
                else:
                    body += piece
                if len(body) > limits.max_body_bytes:
                    raise _too_large(limits)
                if not more:
                    return body
                alarm.reschedule(_due(began, len(body), limits))
    except TimeoutError as error:
        slow = f"or came at less than {limits.min_bytes_per_second} bytes a second"
        raise SlowBodyError(f"the body did not arrive within {limits.body_seconds:g} s, {slow}") from error


def _due(began: float, size: int, limits: ServeLimits) -> float:
    """When a body of which `size` bytes have come is too late or too slow."""
    rate = limits.min_bytes_per_second
    enough = max(limits.grace_seconds, size / rate) if rate else limits.body_seconds
    return began + min(limits.body_seconds, enough)


def _inflate(body: bytes | bytearray, encoding: bytes, limits: ServeLimits) -> bytes:
    inflater = zlib.decompressobj(wbits=31 if encoding == b"gzip" else 15)
    try:
        plain = inflater.decompress(body, limits.max_body_bytes + 1)
    except zlib.error as error:
        raise InputError(f"the body is not valid {encoding.decode()}") from error
    if len(plain) > limits.max_body_bytes:
        raise _too_large(limits)
    if not inflater.eof or inflater.unused_data:
        raise InputError(f"the {encoding.decode()} body is cut short or followed by other bytes")
    return plain


async def discard(receive: Receive, limits: ServeLimits, *, seconds: float = 1.0) -> None:
    """Swallow what the client still sends: closing on unread bytes would destroy the answer on its way."""
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
