"""Server side of a fork server: start it, request children, restart it when it dies. Event loop only."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import subprocess
import time
from typing import Any

import msgspec

from ..errors import InferError, NotReadyError
from .channel import PIECE, ClosedError, MessageBuffer, encode_frame
from .error_messages import ErrorMessage, decode_error
from .forked_children import (
    OPEN_SECONDS,
    ChildExited,
    ForkChild,
    ForkServerReady,
    FromForkServer,
    KillChild,
    LowerPriority,
)
from .spawn import describe_exit, spawn

log = logging.getLogger("infer.serve")
START_SECONDS = OPEN_SECONDS + 10.0  # until a fork server has opened what its children need
PAUSE_SECONDS = 1.0  # between two starts


class ChildDiedError(ClosedError):
    """End of a child without a reply.

    `ended_with`: as `os.waitstatus_to_exitcode` returns it, None where unknown.
    """

    def __init__(self, status: int | None) -> None:
        super().__init__("the process ended: " + ("unknown how" if status is None else describe_exit(status)))
        self.ended_with = status


class Child:
    """A forked process and its socket; one request at a time; the owner must `close` it."""

    def __init__(self, server: ForkServer, number: int, sock: socket.socket, answers: Any) -> None:
        self._server, self.number, self._socket = server, number, sock
        self.lowered = False
        self._encoder = msgspec.msgpack.Encoder()
        self._in, self._at_end = MessageBuffer[Any](answers), False
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int | None] = self._loop.create_future()
        self._loop.add_reader(sock, self._read)

    async def ask(self, message: Any, seconds: float) -> Any:
        """Send a message and return the next one that comes.

        Raises `TimeoutError` after `seconds` on the clock, and `ChildDiedError` when the child is gone.
        """
        frame = bytearray()
        encode_frame(self._encoder, message, frame)
        async with asyncio.timeout(seconds):
            try:
                await self._loop.sock_sendall(self._socket, frame)
            except OSError as error:
                raise await self._death() from error
            while (answer := self._in.next()) is None:
                if self._at_end:
                    raise await self._death()
                self._waiter = self._loop.create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None
            return answer

    def lower_priority(self) -> None:
        """Let other processes go before this one, for the rest of its life."""
        self.lowered = True
        self._server.send(LowerPriority(self.number))

    def close(self) -> None:
        """Kill the process; may be called twice, and from another thread."""
        if not self.ended.done():
            self._server.send(KillChild(self.number))
        run_on_loop(self._loop, self._close_socket)

    def _close_socket(self) -> None:
        self._stop_reading()
        self._socket.close()

    def _read(self) -> None:
        """Buffer received bytes, also while nobody waits for an answer."""
        try:
            piece = self._socket.recv(PIECE)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        self._in.add(piece)
        if not piece:
            self._stop_reading()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _stop_reading(self) -> None:
        if not self._at_end:
            self._at_end = True
            stop_reading(self._loop, self._socket)

    async def _death(self) -> ChildDiedError:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                return ChildDiedError(await asyncio.shield(self.ended))
        return ChildDiedError(None)


class ForkServer:
    """Fork server of `what`, such as one tokenizer, started by `start` or with the first child.

    `module` runs `run_fork_server`; `config` is its first message.
    """

    def __init__(self, module: str, config: Any, what: str) -> None:
        self.config, self._what, self._module = config, what, module
        self._numbers = itertools.count(1)
        self._children: dict[int, Child] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._prepared: asyncio.Future[ForkServerReady] | None = None
        self._started = -PAUSE_SECONDS
        self._loop: asyncio.AbstractEventLoop | None = None
        self._decoder = msgspec.msgpack.Decoder(FromForkServer)
        self._closed = False

    async def child(self, job: str, answers: Any) -> Child:
        """Fork a child that sends messages of the union `answers`.

        Raises `NotReadyError` while there is no fork server, or what preparing it, or the job, raised.
        """
        prepared = await self.prepared()
        if (reason := prepared.unusable.get(job)) is not None:
            raise decode_error(reason)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            child = Child(self, next(self._numbers), ours, answers)
            self._children[child.number] = child
            self.send(ForkChild(child.number, job), theirs.fileno())
        return child

    async def prepared(self) -> ForkServerReady:
        """Wait until the fork server can fork; return its report."""
        self.start()
        waiting = self._prepared
        if waiting is None:
            raise NotReadyError("the server is stopping")
        try:
            async with asyncio.timeout(START_SECONDS):
                return await asyncio.shield(waiting)
        except TimeoutError as error:
            raise NotReadyError(f"the {self._what} is being opened") from error

    def start(self) -> None:
        """Start the process unless it runs; refuse for `PAUSE_SECONDS` after a start."""
        if self._process is not None or self._closed:
            return
        if time.monotonic() - self._started < PAUSE_SECONDS:
            raise NotReadyError(f"the {self._what} is being opened again")
        self._started = time.monotonic()
        loop = self._loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            self._process = spawn(self._module, [theirs.fileno()], [theirs.fileno()])
        except InferError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._control, self._prepared = ours, loop.create_future()
        loop.add_reader(ours, self._read, ours)
        self.send(self.config)

    def send(self, message: Any, descriptor: int | None = None) -> None:
        """Send a message, which is lost where the process died; the owner of the child is notified."""
        if self._control is not None:
            with contextlib.suppress(OSError):
                socket.send_fds(
                    self._control,
                    [msgspec.msgpack.encode(message)],
                    [] if descriptor is None else [descriptor],
                )

    def close(self) -> None:
        """End the process and its children; may be called twice, and from another thread."""
        self._closed = True
        if self._loop is not None:
            run_on_loop(self._loop, self._end, NotReadyError("the server is stopping"))

    def _read(self, control: socket.socket) -> None:
        try:
            data = control.recv(1 << 16)
            message = self._decoder.decode(data) if data else None
        except BlockingIOError:
            return
        except (OSError, msgspec.DecodeError):
            message = None
        if isinstance(message, ChildExited):
            if (child := self._children.pop(message.number, None)) is not None and not child.ended.done():
                child.ended.set_result(message.status)
        elif isinstance(message, ForkServerReady) and self._prepared is not None:
            if not self._prepared.done():
                self._prepared.set_result(message)
        else:
            error = decode_error(message) if isinstance(message, ErrorMessage) else None
            log.error("the process of the %s died: %s", self._what, error or "reason unknown")
            self._end(error or NotReadyError(f"the {self._what} is being opened again"))

    def _end(self, error: Exception) -> None:
        process, self._process = self._process, None
        control, self._control = self._control, None
        prepared, self._prepared = self._prepared, None
        if process is not None:
            process.kill()
            process.wait()
        if control is not None and self._loop is not None:
            stop_reading(self._loop, control)
            control.close()
        if prepared is not None and not prepared.done():
            prepared.set_exception(error)
            prepared.exception()  # raised to those who wait; not logged as never retrieved
        for child in self._children.values():
            if not child.ended.done():
                child.ended.set_result(None)
        self._children.clear()


def run_on_loop(loop: asyncio.AbstractEventLoop, function: Any, *arguments: Any) -> None:
    """Call the function on the loop's thread, or here when the loop does not run."""
    try:
        here = asyncio.get_running_loop() is loop
    except RuntimeError:
        here = False
    if here or not loop.is_running():
        function(*arguments)
    else:
        loop.call_soon_threadsafe(function, *arguments)


def stop_reading(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    if not loop.is_closed() and sock.fileno() >= 0:
        loop.remove_reader(sock)
