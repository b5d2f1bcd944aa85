"""Children of the fork server, and their two jobs: trial compilation of a grammar, and text.

A child that runs the text job has the tokenizer and the chat template of one artifact.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec

from ...errors import ArtifactError, InferError, NotUsableError
from ...llm.text.chat_template import ChatTemplate, no_template
from ...llm.text.grammar.grammar_compiler import GrammarCompiler
from ...llm.text.grammar.grammar_trial import confine, run_trial
from ...llm.text.tokenizer import LLMTokenizer, Tokenizer
from ..workers.messages import encode_error
from ..workers.process import Channel, ClosedError
from .messages import (
    ChildExited,
    CompileTrial,
    DecodedRows,
    DecodedText,
    DecodeRows,
    DecodeTokens,
    EncodeChat,
    EncodeSpans,
    EncodeTexts,
    FindTokens,
    ForkChild,
    KillChild,
    SpanRow,
    SpanRows,
    TokenIds,
    TokenRows,
    ToText,
)

NICE = 10  # of a child that lets others go first
PR_SET_PDEATHSIG = 1


class TextJob:
    """Requests for text, answered one after another under CPU-time limits.

    A signal ends the process at the limit, and tells the server whether it was the chat template (SIGPROF) or
    the tokenizer (SIGVTALRM).
    """

    def __init__(self, text: LLMTokenizer | Tokenizer, folder: Path) -> None:
        self._text, self._folder = text, folder
        self._template: ChatTemplate | None = (
            ChatTemplate.open(folder) if isinstance(text, LLMTokenizer) else None
        )
        if self._template is not None:
            with contextlib.suppress(NotUsableError):  # reported when a chat is to be rendered
                self._template.load()

    def run(self, sock: socket.socket) -> None:
        """Answer requests until the other side closes the socket."""
        channel: Channel[Any] = Channel(sock, ToText)
        for number in (signal.SIGPROF, signal.SIGVTALRM):
            signal.signal(number, signal.SIG_DFL)
        while True:
            try:
                asked = channel.receive()
            except ClosedError:
                return
            try:
                answer = self._answer(asked)
            except (InferError, MemoryError) as error:
                answer = encode_error(error)
            except BaseException as error:  # noqa: BLE001 - a panic of the library too
                said = f"{type(error).__name__}: {str(error)[:200]}"
                answer = encode_error(
                    ArtifactError(f"the tokenizer of this model fails on this text: {said}")
                )
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            channel.send(answer)

    def _answer(self, asked: Any) -> Any:
        if isinstance(asked, EncodeChat):
            signal.setitimer(signal.ITIMER_PROF, asked.template_seconds)
            text = self._render(json.loads(asked.chat))
            signal.setitimer(signal.ITIMER_PROF, 0)
            asked = EncodeTexts([text], False, asked.seconds)
        signal.setitimer(signal.ITIMER_VIRTUAL, asked.seconds)
        if isinstance(asked, EncodeTexts):
            if isinstance(self._text, LLMTokenizer):
                return TokenRows([self._text.encode(str(text), asked.special) for text in asked.texts])
            rows, types = self._text.encode_typed(asked.texts)
            return TokenRows(rows, types if any(isinstance(text, tuple) for text in asked.texts) else [])
        if isinstance(asked, EncodeSpans) and isinstance(self._text, Tokenizer):
            return SpanRows(
                [SpanRow.of(one) for one in self._text.span_encodings(asked.texts, asked.question)]
            )
        if isinstance(asked, DecodeTokens) and isinstance(self._text, LLMTokenizer):
            return DecodedText(self._text.decode(asked.ids, asked.skip_special))
        if isinstance(asked, FindTokens) and isinstance(self._text, Tokenizer):
            return TokenIds([self._text.token_id(token) for token in asked.tokens])
        if isinstance(asked, DecodeRows) and isinstance(self._text, Tokenizer):
            return DecodedRows([self._text.decode(*row) for row in asked.rows])
        raise InferError("expected a request for this kind of tokenizer")

    def _render(self, chat: dict[str, Any]) -> str:
        if self._template is None:
            raise no_template("this model")
        return self._template.render(chat.pop("messages"), tools=chat.pop("tools"), **chat)


class Children:
    """Child processes of one fork server; they inherit `text` and `compiler`."""

    def __init__(self, control: socket.socket, text: TextJob, compiler: GrammarCompiler | None) -> None:
        self._control, self._text, self._compiler = control, text, compiler
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
            if asked.job == "text":
                self._text.run(sock)
            elif self._compiler is not None:
                _compile_trial(sock, self._compiler)
            code = 0
        finally:
            os._exit(code)


def _compile_trial(sock: socket.socket, compiler: GrammarCompiler) -> None:
    channel: Channel[Any] = Channel(sock, CompileTrial)
    asked: Any = channel.receive()
    try:
        if asked.politely:
            os.nice(NICE)
        confine(compiler.limits.compiled_bytes, asked.seconds)
        answer: Any = run_trial(compiler, asked.kind, asked.value)
    except BaseException as error:  # noqa: BLE001 - a panic of the library too; the server reports it
        answer = encode_error(error)
    channel.send(answer)


def _set_up_child(server: int) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where libraries write their panics
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)
