"""Where one HTTP message ends. The parser is fed one message at a time, and what frames a body is bounded."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from http import HTTPStatus

import msgspec

from ..limits import ServeLimits

SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(;[^\r\n]*)?\r\n")
HEAD_END = b"\r\n\r\n"
SAID = {
    HTTPStatus.MISDIRECTED_REQUEST: "that Host is none of this server's names. "
    "Say --allow-host NAME when you start it, if it should be",
}


class FramingError(Exception):
    """The body is announced in two ways, or cut into more, or longer, pieces than anybody needs."""


class SizedBody:
    """A body of `length` bytes, of which `left` are to come."""

    def __init__(self, length: int) -> None:
        self.left = length

    @property
    def done(self) -> bool:
        return self.left == 0

    def reach(self, data: bytes, at: int) -> int:
        """Where in `data`, from `at` on, the body ends, or the data."""
        step = min(self.left, len(data) - at)
        self.left -= step
        return at + step


class ChunkedBody:
    """A body in chunks. Only what is bounded is looked at; whether all is well formed, the parser says."""

    def __init__(self, limits: ServeLimits) -> None:
        self._limits = limits
        self._line, self._skip = b"", 0
        self._chunks = self._trailer = 0
        self._last, self.done = False, False

    def reach(self, data: bytes, at: int) -> int:
        """Where in `data`, from `at` on, the body ends, or the data; raises `FramingError`."""
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
    """The body that a head speaks of, None without one; raises `FramingError` where that can be read in two ways."""
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
    """Finds the end of a head that comes in pieces."""

    def __init__(self) -> None:
        self._tail = b""

    def reach(self, data: bytes, at: int) -> int:
        """Where in `data`, from `at` on, the head ends, or the data."""
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


def refusal(status: HTTPStatus) -> bytes:
    """A whole answer, for requests that never came as far as a route."""
    body = msgspec.json.encode({"error": SAID.get(status, status.phrase)})
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
    tail = f"content-length: {len(body)}\r\nx-request-id: {os.urandom(16).hex()}\r\nconnection: close\r\n\r\n"
    return head.encode() + tail.encode() + body
