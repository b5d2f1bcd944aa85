"""Fork server entry point: `python -m infer.serve.fork_server FD`; opens a tokenizer, then forks. One thread.

It ends with the server process: its socket closes, and its children are killed.
"""

from __future__ import annotations

import signal
import socket
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import msgspec

from ...errors import InferError
from ...llm.text.grammar.grammar_compiler import GrammarCompiler
from ...llm.text.tokenizer import LLMTokenizer, Tokenizer
from ..workers.messages import ErrorMessage, encode_error
from ..workers.process import ClosedError
from .children import MESSAGE, Children, fork_on_request
from .messages import ForkServerConfig, ForkServerReady
from .text_jobs import TextJob, compile_trial

OPEN_SECONDS = 60  # to open the tokenizer, or the process is killed


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
    signal.alarm(0)
    fork_on_request(children, control, prepared)
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
    jobs = {"text": TextJob(text, Path(asked.folder)).run}
    if compiler is not None:
        jobs["trial"] = partial(compile_trial, compiler)
    return Children(control, jobs), ForkServerReady(unusable)


if __name__ == "__main__":
    try:
        sys.exit(main(int(sys.argv[1])))
    except (ClosedError, OSError):
        sys.exit(0)
