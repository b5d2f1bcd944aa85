"""Fork server entry point: `python -m infer.serve.fork_server FD`; opens a tokenizer, then forks. One thread.

It ends with the server process: its socket closes, and its children are killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from ...errors import InferError
from ...llm.text.grammar_compiler import GrammarCompiler
from ...llm.text.grammar_trial import confine, run_trial
from ...llm.text.tokenizer import LLMTokenizer, Tokenizer
from ..workers.channel import Channel, ClosedError
from ..workers.messages import ErrorMessage, encode_error
from .messages import (
    ChildExited,
    CompileTrial,
    ForkChild,
    ForkServerConfig,
    ForkServerReady,
    KillChild,
    ToServer,
)
from .text_job import TextJob

OPEN_SECONDS = 60  # to open the tokenizer, or the process is killed
MESSAGE = 1 << 20
NICE = 10  # of a child that lets others go first
PR_SET_PDEATHSIG = 1


class Children:
    """Child processes of one fork server; they inherit `text` and `compiler`."""

    def __init__(self, control: socket.socket, text: TextJob, compiler: GrammarCompiler | None) -> None:
        self._control, self._text, self._compiler = control, text, compiler
        self._pids: dict[int, int] = {}  # by the number that the front gave
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
            _be_a_child(server)
            self._control.close()
            sock = socket.socket(fileno=descriptor)
            if asked.job == "text":
                self._text.run(sock)
            elif self._compiler is not None:
                _try_out(sock, self._compiler)
            code = 0
        finally:
            os._exit(code)


def _try_out(sock: socket.socket, compiler: GrammarCompiler) -> None:
    channel: Channel[Any] = Channel(sock, CompileTrial)
    asked: Any = channel.receive()
    try:
        if asked.politely:
            os.nice(NICE)
        confine(compiler.limits.compiled_bytes, asked.seconds)
        answer: Any = run_trial(compiler, asked.kind, asked.value)
    except BaseException as error:  # noqa: BLE001 - a panic of the library too; the front tells it
        answer = encode_error(error)
    channel.send(answer)


def _be_a_child(server: int) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where libraries tell of their panics
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)


def main(descriptor: int) -> int:
    for number in (signal.SIGTERM, signal.SIGINT):  # for the front to answer
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=descriptor)
    signal.alarm(OPEN_SECONDS)
    asked = msgspec.msgpack.decode(control.recv(MESSAGE), type=ForkServerConfig)
    try:
        children, prepared = _prepare(asked, control)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the front tells it
        control.send(msgspec.msgpack.encode(encode_error(error)))
        return 3
    gc.collect()
    gc.freeze()
    signal.alarm(0)
    children.send(prepared)
    with contextlib.suppress(OSError):
        _loop(control, children)
    children.kill()
    return 0


def _prepare(asked: ForkServerConfig, control: socket.socket) -> tuple[Children, ForkServerReady]:
    path = Path(asked.folder) / "tokenizer.json"
    text = Tokenizer(path, max_length=asked.max_length) if asked.max_length else LLMTokenizer(path)
    unusable: ErrorMessage | None = None
    compiler = None
    if asked.vocab_size and isinstance(text, LLMTokenizer) and find_spec("llguidance") is not None:
        compiler = GrammarCompiler(text.tokenizer, asked.vocab_size, asked.eos_ids, asked.limits)
        try:
            compiler.load()
        except InferError as error:
            unusable = encode_error(error)
    return Children(control, TextJob(text, Path(asked.folder)), compiler), ForkServerReady(unusable)


def _loop(control: socket.socket, children: Children) -> None:
    """Handle messages and child exits until the server closes the socket."""
    decoder = msgspec.msgpack.Decoder(ToServer)
    wake, told = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
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


if __name__ == "__main__":
    try:
        sys.exit(main(int(sys.argv[1])))
    except (ClosedError, OSError):
        sys.exit(0)
