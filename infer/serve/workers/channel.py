"""Messages over a stream socket: four bytes of length, little-endian, then msgpack."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from typing import Any, Generic, TypeVar

import msgspec

M = TypeVar("M")
PIECE = 1 << 18
LONGEST = 1 << 30  # bytes of one message


class ClosedError(Exception):
    """End of the channel: the process at the other side ended."""


class Channel(Generic[M]):
    """One end of the channel; any thread may `send`, one thread at a time may `receive`.

    `kinds` is the union of message types that `receive` decodes.
    """

    def __init__(self, sock: socket.socket, kinds: Any) -> None:
        self._socket = sock
        sock.setblocking(False)
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(kinds)
        self._out, self._sending = bytearray(), threading.Lock()
        self._in = bytearray()
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable.register(sock, select.POLLOUT)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        """Send one message; raise `ClosedError` when the other side ended."""
        with self._sending:
            out = self._out
            self._encoder.encode_into(message, out, 4)
            out[:4] = (len(out) - 4).to_bytes(4, "little")
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

    def receive(self, timeout: float | None = None) -> M | None:
        """Return the next message, or None after `timeout` seconds; raise `ClosedError` at the end."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (message := self._parse()) is None:
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
            self._in += piece
        return message

    def _parse(self) -> M | None:
        if len(self._in) < 4:
            return None
        size = int.from_bytes(self._in[:4], "little")
        if size > LONGEST:
            raise ClosedError(f"a message of {size} bytes")
        if len(self._in) < 4 + size:
            return None
        with memoryview(self._in) as view:
            message: M = self._decoder.decode(view[4 : 4 + size])
        del self._in[: 4 + size]
        return message

    def close(self) -> None:
        self._socket.close()
