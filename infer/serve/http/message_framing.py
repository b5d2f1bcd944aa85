"""HTTP/1.1 message framing (RFC 9112): end of a head and of a body, with limits on chunks."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from http import HTTPStatus

import msgspec

from ..limits import ServeLimits

SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(;[^\r\n]*)?\r\n")
UPGRADE = re.compile(rb"(\n)upgrade(?=:)", re.IGNORECASE)
UPGRADE_NAME = b"upgrade"
HEAD_END = b"\r\n\r\n"
HINTS = {
    HTTPStatus.MISDIRECTED_REQUEST: "the Host header is not a name of this server. "
    "Start it with --allow-host NAME to accept one",
}


class FramingError(Exception):
    """Ambiguous body length, or chunks beyond the limits."""


class SizedBody:
    """Body with a Content-Length; `left`: bytes to come."""

    def __init__(self, length: int) -> None:
        self.left = length

    @property
    def done(self) -> bool:
        return self.left == 0

    def end(self, data: bytes, at: int) -> int:
        """Return the offset in `data`, from `at` on, at which the body or the data ends."""
        step = min(self.left, len(data) - at)
        self.left -= step
        return at + step


class ChunkedBody:
    """Chunked body. Checks only limits; the parser checks syntax."""

    def __init__(self, limits: ServeLimits) -> None:
        self._limits = limits
        self._line, self._skip = b"", 0
        self._chunks = self._trailer = 0
        self._last, self.done = False, False

    def end(self, data: bytes, at: int) -> int:
        """Return the offset in `data`, from `at` on, at which the body or the data ends. Raises `FramingError`."""
        while at < len(data) and not self.done:
            if self._skip:
                step = min(self._skip, len(data) - at)
                self._skip -= step
                at += step
                continue
            newline = data.find(b"\n", at)
            stop = newline + 1 or len(data)
            self._line += data[at:stop]
            at = stop
            self._check_length()
            if newline >= 0:
                line, self._line = self._line, b""
                self._read(line)
        return at

    def _check_length(self) -> None:
        longest = self._limits.max_header_bytes if self._last else self._limits.max_chunk_extension + 19
        if len(self._line) + self._trailer > longest:
            raise FramingError

    def _read(self, line: bytes) -> None:
        if self._last:
            self._trailer += len(line)
            self.done = line == b"\r\n"
            return
        found = SIZE.fullmatch(line)
        self._chunks += 1
        if found is None or self._chunks > self._limits.max_chunks:
            raise FramingError
        if len(found[2] or b"") > self._limits.max_chunk_extension:
            raise FramingError
        size = int(found[1], 16)
        self._skip, self._last = (size + 2 if size else 0), size == 0


def body_framing(
    headers: Mapping[bytes, bytes], version: str, limits: ServeLimits
) -> SizedBody | ChunkedBody | None:
    """Return the framing of the body that a head announces, None for no body. Raises `FramingError` if ambiguous."""
    length, coding = headers.get(b"content-length"), headers.get(b"transfer-encoding")
    if coding is not None:
        if length is not None or version == "1.0" or coding.lower() != b"chunked":
            raise FramingError
        return ChunkedBody(limits)
    if length is None:
        return None
    if not length.isdigit() or len(length) > 18:
        raise FramingError
    return SizedBody(int(length)) if int(length) else None


class HeadScanner:
    """Search for the end of a head that arrives in pieces."""

    def __init__(self) -> None:
        self._tail = b""

    def end(self, data: bytes, at: int) -> int:
        """Return the offset in `data`, from `at` on, at which the head or the data ends."""
        if self._tail:
            found = (self._tail + data[at : at + 3]).find(HEAD_END)
            if found >= 0:
                end = at + found + len(HEAD_END) - len(self._tail)
                self._tail = b""
                return end
        found = data.find(HEAD_END, at)
        if found >= 0:
            self._tail = b""
            return found + len(HEAD_END)
        self._tail = (self._tail + data[max(at, len(data) - 3) :])[-3:]
        return len(data)


class HeadFilter:
    """Bytes of heads as the parser sees them: without the name of header Upgrade, which would end HTTP for it.

    A beginning of that name is kept back until the next piece tells whether it is one. Start with `begin` at each head.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._kept, self._starts_line, self._request_line = b"", False, b""

    def pass_on(self, data: bytes) -> bytes:
        """Return what to feed for this piece; raise `FramingError` for a request line with two spaces in a row."""
        if not self._request_line.strip(b"\r\n") or b"\n" not in self._request_line:
            self._request_line = self._request_line.lstrip(b"\r\n") + data
            if b"  " in self._request_line.lstrip(b"\r\n").partition(b"\n")[0]:
                raise FramingError
        start = b"\n" if self._starts_line else b""
        data = start + self._kept + data
        before, newline, last = data.rpartition(b"\n")
        self._starts_line = bool(newline) and UPGRADE_NAME.startswith(last.lower())
        self._kept = last if self._starts_line else b""
        fed = before + newline if self._starts_line else data
        return UPGRADE.sub(rb"\1X-grade", fed)[len(start) :]


def refusal(status: HTTPStatus) -> bytes:
    """Return a whole error response for a request that is refused before routing."""
    body = msgspec.json.encode({"error": HINTS.get(status, status.phrase)})
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
    tail = f"content-length: {len(body)}\r\nx-request-id: {os.urandom(16).hex()}\r\nconnection: close\r\n\r\n"
    return head.encode() + tail.encode() + body
