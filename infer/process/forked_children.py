"""Process that forks: it opens what its children need, then forks and kills them at the server's request. One thread.

It reports how each child ended. It ends with the server process: its socket closes, and its children are killed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from . import child
from .error_messages import ErrorMessage, encode_error

MESSAGE = 1 << 20
NICE = 10  # of a child that lets others go first
OPEN_SECONDS = 60  # to open what children need, or the process is killed
Jobs = Mapping[str, Callable[[socket.socket], None] | ErrorMessage]


class ForkServerReady(msgspec.Struct, tag="prepared", frozen=True, array_like=True):
    """Fork server to server: it can fork. `unusable`: why a child for these jobs can't be had."""

    unusable: dict[str, ErrorMessage] = {}


class ForkChild(msgspec.Struct, tag="fork", frozen=True, array_like=True):
    """Fork server request, sent with a socket: fork a child for this job on that socket."""

    number: int
    job: str


class KillChild(msgspec.Struct, tag="kill", frozen=True, array_like=True):
    """Server to fork server: kill this child if it runs."""

    number: int


class LowerPriority(msgspec.Struct, tag="nice", frozen=True, array_like=True):
    """Server to fork server: let the others go before this child from now on."""

    number: int


class ChildExited(msgspec.Struct, tag="ended", frozen=True, array_like=True):
    """Fork server to server: this child ended, with `os.waitstatus_to_exitcode`'s status."""

    number: int
    status: int


ToForkServer = ForkChild | KillChild | LowerPriority
FromForkServer = ForkServerReady | ChildExited | ErrorMessage


def run_fork_server(arguments: list[str], config: Any, prepare: Callable[[Any], Jobs]) -> int:
    """Fork children until the server closes the socket; return the exit code, 3 where `prepare` raised.

    `arguments`: process id of the server and descriptor of the socket. `prepare` gets the first message, decoded as a
    `config`, opens what children need, and returns what a child of each name does with its socket, or why none can.
    """
    parent, descriptor = map(int, arguments)
    child.ignore_stop_signals()
    child.end_with_parent(parent)
    control = socket.socket(fileno=descriptor)
    signal.alarm(OPEN_SECONDS)
    first = control.recv(MESSAGE)
    if not first:
        return 0
    try:
        jobs = prepare(msgspec.msgpack.decode(first, type=config))
    except BaseException as error:  # noqa: BLE001 - whatever it is, the server reports it
        control.send(msgspec.msgpack.encode(encode_error(error)))
        return 3
    signal.alarm(0)
    children = _Children(control, jobs)
    gc.collect()
    gc.freeze()
    with contextlib.suppress(OSError):
        children.send(ForkServerReady({name: job for name, job in jobs.items() if not callable(job)}))
        children.serve()
    children.kill()
    return 0


class _Children:
    """Child processes of one fork server."""

    def __init__(self, control: socket.socket, jobs: Jobs) -> None:
        self._control, self._jobs = control, jobs
        self._pids: dict[int, int] = {}  # by the server's number
        self._encoder = msgspec.msgpack.Encoder()

    def serve(self) -> None:
        """Handle messages and exits of children until the server closes the socket."""
        decoder = msgspec.msgpack.Decoder(ToForkServer)
        wake, notify = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(notify, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(wake, select.POLLIN)
        while True:
            ready = {place for place, _ in poll.poll()}
            if wake in ready:
                os.read(wake, 4096)
                self._reap()
            if self._control.fileno() in ready:
                data, descriptors, _, _ = socket.recv_fds(self._control, MESSAGE, 1)
                if not data:
                    return
                self._handle(decoder.decode(data), descriptors[0] if descriptors else None)

    def send(self, message: Any) -> None:
        self._control.send(self._encoder.encode(message))

    def kill(self) -> None:
        for pid in self._pids.values():
            os.kill(pid, signal.SIGKILL)

    def _handle(self, message: Any, descriptor: int | None) -> None:
        if isinstance(message, ForkChild) and descriptor is not None:
            self._pids[message.number] = child.fork(lambda: self._run(message.job, descriptor))
            os.close(descriptor)
        elif (pid := self._pids.get(message.number)) is None:  # reaped, so that the number may be another's
            return
        elif isinstance(message, KillChild):
            os.kill(pid, signal.SIGKILL)
        elif isinstance(message, LowerPriority):
            os.setpriority(os.PRIO_PROCESS, pid, NICE)

    def _reap(self) -> None:
        for number, pid in list(self._pids.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del self._pids[number]
                self.send(ChildExited(number, os.waitstatus_to_exitcode(status)))

    def _run(self, name: str, descriptor: int) -> None:
        """Do a job in the child process."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where libraries write their panics
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._control.close()
        job = self._jobs[name]
        if callable(job):
            job(socket.socket(fileno=descriptor))
