"""Fork server of a tokenizer, `python -m infer.serve.text_jobs PARENT FD`, and what its children do: text, grammars."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...errors import ArtifactError, InferError, NotUsableError
from ...llm.text.chat_template import ChatTemplate, no_template
from ...llm.text.grammar.grammar_compiler import GrammarCompiler
from ...llm.text.grammar.grammar_trial import confine_trial, run_trial
from ...llm.text.tokenizer import LLMTokenizer, Tokenizer
from ...process.channel import Channel, ClosedError
from ...process.error_messages import encode_error
from ...process.forked_children import NICE, Jobs, run_fork_server
from .messages import (
    CompileTrial,
    DecodedRows,
    DecodedText,
    DecodeRows,
    DecodeTokens,
    EncodeChat,
    EncodeSpans,
    EncodeTexts,
    FindTokens,
    FromText,
    FromTrial,
    SpanRow,
    SpanRows,
    TokenIds,
    TokenizerConfig,
    TokenRows,
    ToText,
)


def prepare(asked: TokenizerConfig) -> Jobs:
    """Open the tokenizer of a folder, and its compiler of grammars where one is asked for and installed."""
    path = Path(asked.folder) / "tokenizer.json"
    text = Tokenizer(path, max_length=asked.max_length) if asked.max_length else LLMTokenizer(path)
    jobs: dict[str, Any] = {"text": TextJob(text, Path(asked.folder)).run}
    if asked.vocab_size and isinstance(text, LLMTokenizer) and find_spec("llguidance") is not None:
        compiler = GrammarCompiler(text.tokenizer, asked.vocab_size, asked.eos_ids, asked.limits)
        jobs["trial"] = partial(compile_trial, compiler)
        try:
            compiler.load()
        except InferError as error:
            jobs["trial"] = encode_error(error)
    return jobs


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

    def _answer(self, asked: ToText) -> FromText:
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


def compile_trial(compiler: GrammarCompiler, sock: socket.socket) -> None:
    """Compile one grammar and send what it cost, or why it failed."""
    channel: Channel[CompileTrial] = Channel(sock, CompileTrial)
    asked = channel.receive()
    try:
        if asked.politely:
            os.nice(NICE)
        confine_trial(compiler.limits.compiled_bytes, asked.seconds)
        answer: FromTrial = run_trial(compiler, asked.kind, asked.value)
    except BaseException as error:  # noqa: BLE001 - a panic of the library too; the server reports it
        answer = encode_error(error)
    channel.send(answer)


if __name__ == "__main__":
    sys.exit(run_fork_server(sys.argv[1:], TokenizerConfig, prepare))
