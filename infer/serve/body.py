"""Reading a request body: bounded in bytes, in time, and again after inflating."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ..errors import InputError, TooLargeError, UnsupportedMediaError
from .limits import ServeLimits
from .routing import SlowBodyError

Receive = Callable[[], Awaitable[Any]]


class ClientGoneError(Exception):
    """The client hung up before its request was complete; nobody is left to be told."""


async def read_body(
    receive: Receive, headers: Mapping[bytes, bytes], limits: ServeLimits
) -> bytes | bytearray:
    """The whole body, inflated. Raises `TooLargeError` (before reading where the length is given),
    `SlowBodyError`, `UnsupportedMediaError`, `InputError` and `ClientGoneError`."""
    length = headers.get(b"content-length")
    if length is None and b"transfer-encoding" not in headers:
        return b""
    if length is not None and int(length) > limits.max_body_bytes:
        raise _too_large(limits)
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding not in (b"identity", b"gzip", b"deflate"):
        raise UnsupportedMediaError("this content encoding is not taken", hint="Use gzip, deflate or none")
    try:
        async with asyncio.timeout(limits.body_seconds):
            body = await _collect(receive, limits)
    except TimeoutError as error:
        raise SlowBodyError(f"the body did not arrive within {limits.body_seconds:g} s") from error
    return body if encoding == b"identity" else _inflate(body, encoding, limits)


async def _collect(receive: Receive, limits: ServeLimits) -> bytes | bytearray:
    first = await receive()
    if first["type"] == "http.disconnect":
        raise ClientGoneError
    body, more = first.get("body", b""), first.get("more_body", False)
    if more:
        body = bytearray(body)
    while more and len(body) <= limits.max_body_bytes:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        body += message.get("body", b"")
        more = message.get("more_body", False)
    if len(body) > limits.max_body_bytes:
        raise _too_large(limits)
    return body


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
