"""Children of a fork server: they are forked and killed at the server's request, and their ends are reported."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from .messages import ChildExited, ForkChild, ForkServerReady, KillChild, ToServer

PR_SET_PDEATHSIG = 1
MESSAGE = 1 << 20


class Children:
    """Child processes of one fork server. `jobs`: what a child of this name does with its socket."""

    def __init__(self, control: socket.socket, jobs: Mapping[str, Callable[[socket.socket], None]]) -> None:
        self._control, self._jobs = control, jobs
        self._pids: dict[int, int] = {}  # by the server's number
        self._encoder = msgspec.msgpack.Encoder()

    def handle(self, message: Any, descriptor: int | None) -> None:
        if isinstance(message, ForkChild) and descriptor is not None:
            self._fork(message, descriptor)
        elif isinstance(message, KillChild) and (pid := self._pids.get(message.number)) is not None:
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so that the number is still its own

    def reap(self) -> None:
        for number, pid in list(self._pids.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del self._pids[number]
                self.send(ChildExited(number, os.waitstatus_to_exitcode(status)))

    def kill(self) -> None:
        for pid in self._pids.values():
            os.kill(pid, signal.SIGKILL)

    def send(self, message: Any) -> None:
        self._control.send(self._encoder.encode(message))

    def _fork(self, asked: ForkChild, descriptor: int) -> None:
        server = os.getpid()
        if pid := os.fork():
            os.close(descriptor)
            self._pids[asked.number] = pid
            return
        code = 1
        try:
            _set_up_child(server)
            self._control.close()
            sock = socket.socket(fileno=descriptor)
            self._jobs[asked.job](sock)
            code = 0
        finally:
            os._exit(code)


def fork_on_request(children: Children, control: socket.socket, ready: ForkServerReady) -> None:
    """Report that this process can fork, then handle messages and child exits until the server closes the socket."""
    gc.collect()
    gc.freeze()
    children.send(ready)
    with contextlib.suppress(OSError):
        _loop(control, children)
    children.kill()


def _loop(control: socket.socket, children: Children) -> None:
    decoder = msgspec.msgpack.Decoder(ToServer)
    wake, notify = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(notify, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(wake, select.POLLIN)
    while True:
        ready = {place for place, _ in poll.poll()}
        if wake in ready:
            os.read(wake, 4096)
            children.reap()
        if control.fileno() in ready:
            data, descriptors, _, _ = socket.recv_fds(control, MESSAGE, 1)
            if not data:
                return
            children.handle(decoder.decode(data), descriptors[0] if descriptors else None)


def _set_up_child(server: int) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where libraries write their panics
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)
