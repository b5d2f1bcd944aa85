"""Worker process, and the channel to it: four bytes of length, little-endian, then msgpack, over a stream socket."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from ...errors import NotUsableError
from .messages import ShutDown

M = TypeVar("M")
PIECE = 1 << 18
LONGEST = 1 << 30  # bytes of one message
END_SECONDS = 5.0  # for a worker that was asked to end


class ClosedError(Exception):
    """End of the channel: the process at the other side ended."""


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


class ChildProcess:
    """Process that runs `module`, and its channel, which receives `kinds`; ended by `close` or `kill`.

    Create it on a thread that lives as long as the process shall: Linux ends a child with the thread that
    started it.
    """

    def __init__(
        self, kinds: Any, descriptors: Sequence[int] = (), module: str = "infer.serve.workers"
    ) -> None:
        ours, theirs = socket.socketpair()
        fds = [theirs.fileno(), *descriptors]
        command = [sys.executable, "-P", "-m", module, str(os.getpid()), *map(str, fds)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=2, env=env, pass_fds=fds, process_group=0
            )
        except OSError as error:
            ours.close()
            raise NotUsableError(f"no process could be started: {error.strerror}") from error
        finally:
            theirs.close()
        self.pid = self._process.pid
        self.channel: Channel[Any] = Channel(ours, kinds)

    @property
    def exit(self) -> str:
        """Description of its exit status, after a short wait for it."""
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "it hung up and runs on"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        """Kill the process; its memory is free on return."""
        self._process.kill()
        self._process.wait()
        self.channel.close()

    def close(self) -> None:
        """Tell the process to end, and kill it after a timeout."""
        with contextlib.suppress(ClosedError):
            self.channel.send(ShutDown())
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self.kill()


def process_age() -> float:
    """Return the seconds since this process was started, to 0.01 s; 0 where unknown."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return 0.0
