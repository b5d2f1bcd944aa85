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
from ...llm.text.chat_template import ChatTemplate
from ...llm.text.grammar.grammar_compiler import GrammarCompiler
from ...llm.text.grammar.grammar_trial import confine_trial, run_trial
from ...llm.text.tokenizer import LLMTokenizer, Tokenizer
from ...process.channel import Channel, ClosedError
from ...process.error_messages import encode_error
from ...process.forked_children import NICE, Jobs, run_fork_server
from .messages import (
    CallTexts,
    CompileTrial,
    EncodeChat,
    FromText,
    FromTrial,
    TextsAnswer,
    TokenizerConfig,
    ToText,
)
from .texts import EncoderTexts, GeneratorTexts


def prepare(asked: TokenizerConfig) -> Jobs:
    """Open the tokenizer of a folder, and its compiler of grammars where one is asked for and installed."""
    folder = Path(asked.folder)
    path = folder / "tokenizer.json"
    if asked.max_length:
        return {"text": TextJob(EncoderTexts(Tokenizer(path, max_length=asked.max_length))).run}
    tokenizer, template = LLMTokenizer(path), ChatTemplate.open(folder)
    if template is not None:
        with contextlib.suppress(NotUsableError):  # reported when a chat is to be rendered
            template.load()
    jobs: dict[str, Any] = {"text": TextJob(GeneratorTexts(tokenizer, template)).run}
    if asked.vocab_size and find_spec("llguidance") is not None:
        compiler = GrammarCompiler(tokenizer.tokenizer, asked.vocab_size, asked.eos_ids, asked.limits)
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

    def __init__(self, texts: GeneratorTexts | EncoderTexts) -> None:
        self._texts = texts

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
                answer: FromText = TextsAnswer(self._answer(asked))
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

    def _answer(self, asked: ToText) -> Any:
        call = self._render(asked) if isinstance(asked, EncodeChat) else asked
        signal.setitimer(signal.ITIMER_VIRTUAL, call.seconds)
        return getattr(self._texts, call.method)(*call.arguments)

    def _render(self, asked: EncodeChat) -> CallTexts:
        """Return the call that tokenizes a conversation."""
        if not isinstance(self._texts, GeneratorTexts):
            raise InferError("an encoder takes no conversations")
        signal.setitimer(signal.ITIMER_PROF, asked.template_seconds)
        text = self._texts.render(**json.loads(asked.chat))
        signal.setitimer(signal.ITIMER_PROF, 0)
        return CallTexts("encode", ([text], False), asked.seconds)


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
