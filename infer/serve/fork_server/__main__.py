"""Fork server entry point: `python -m infer.serve.fork_server FD`; opens a tokenizer, then forks. One thread.

It ends with the server process: its socket closes, and its children are killed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec

from ...errors import InferError
from ...llm.text.grammar.grammar_compiler import GrammarCompiler
from ...llm.text.tokenizer import LLMTokenizer, Tokenizer
from ..workers.messages import ErrorMessage, encode_error
from ..workers.process import ClosedError
from .children import Children, TextJob
from .messages import ForkServerConfig, ForkServerReady, ToServer

OPEN_SECONDS = 60  # to open the tokenizer, or the process is killed
MESSAGE = 1 << 20


def main(descriptor: int) -> int:
    for number in (signal.SIGTERM, signal.SIGINT):  # the server handles them
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=descriptor)
    signal.alarm(OPEN_SECONDS)
    asked = msgspec.msgpack.decode(control.recv(MESSAGE), type=ForkServerConfig)
    try:
        children, prepared = _prepare(asked, control)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the server reports it
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


if __name__ == "__main__":
    try:
        sys.exit(main(int(sys.argv[1])))
    except (ClosedError, OSError):
        sys.exit(0)
