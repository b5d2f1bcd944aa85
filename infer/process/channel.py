"""Messages between two processes: four bytes of length, little-endian, then msgpack, over a stream socket."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from typing import Any, Generic, TypeVar, overload

import msgspec

M = TypeVar("M")
PIECE = 1 << 18
LONGEST = 1 << 30  # bytes of one message


class ClosedError(Exception):
    """End of the channel: the process at the other side ended."""


def encode_frame(encoder: msgspec.msgpack.Encoder, message: Any, frame: bytearray) -> None:
    """Write a message with its length into `frame`, which takes its size; the bytes of the message are copied once."""
    encoder.encode_into(message, frame, 4)
    frame[:4] = (len(frame) - 4).to_bytes(4, "little")


class MessageBuffer(Generic[M]):
    """Received bytes, and the messages in them. `kinds`: union of the message types that `next` decodes."""

    def __init__(self, kinds: Any, longest: int = LONGEST) -> None:
        self._decoder = msgspec.msgpack.Decoder(kinds)
        self._bytes, self._longest = bytearray(), longest

    def add(self, data: bytes) -> None:
        self._bytes += data

    def next(self) -> M | None:
        """Return the next whole message, None before it has arrived; raise `ClosedError` for one that is too long."""
        held = self._bytes
        if len(held) < 4:
            return None
        size = int.from_bytes(held[:4], "little")
        if size > self._longest:
            raise ClosedError(f"a message of {size} bytes")
        if len(held) < 4 + size:
            return None
        with memoryview(held) as view:
            message: M = self._decoder.decode(view[4 : 4 + size])
        del held[: 4 + size]
        return message


class Channel(Generic[M]):
    """One end of the channel; any thread may `send`, one thread at a time may `receive`.

    `kinds` is the union of message types that `receive` decodes.
    """

    def __init__(self, sock: socket.socket, kinds: Any) -> None:
        self._socket = sock
        sock.setblocking(False)
        self._encoder, self._in = msgspec.msgpack.Encoder(), MessageBuffer[M](kinds)
        self._out, self._sending = bytearray(), threading.Lock()
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable.register(sock, select.POLLOUT)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        """Send one message; raise `ClosedError` when the other side ended."""
        with self._sending:
            out = self._out
            encode_frame(self._encoder, message, out)
            view, sent = memoryview(out), 0
            try:
                while sent < len(view):
                    with contextlib.suppress(BlockingIOError):
                        sent += self._socket.send(view[sent:])
                    if sent < len(view):
                        self._writable.poll(1000)
            except OSError as error:
                raise ClosedError(str(error)) from error
            finally:
                view.release()

    @overload
    def receive(self, timeout: None = None) -> M: ...

    @overload
    def receive(self, timeout: float) -> M | None: ...

    def receive(self, timeout: float | None = None) -> M | None:
        """Return the next message, or None after `timeout` seconds; raise `ClosedError` at the end."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (message := self._in.next()) is None:
            try:
                piece = self._socket.recv(PIECE)
            except BlockingIOError:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._readable.poll(None if left is None else 1000 * left)
                continue
            except OSError as error:
                raise ClosedError(str(error)) from error
            if not piece:
                raise ClosedError("end of stream")
            self._in.add(piece)
        return message

    def close(self) -> None:
        self._socket.close()
