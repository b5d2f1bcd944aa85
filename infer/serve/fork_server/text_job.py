"""Tokenizer and chat template of an artifact, run in a child of the fork server."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
from pathlib import Path
from typing import Any

from ...errors import ArtifactError, InferError, NotUsableError
from ...llm.text.chat_template import ChatTemplate, no_template
from ...llm.text.tokenizer import LLMTokenizer, Tokenizer
from ..workers.channel import Channel, ClosedError
from ..workers.messages import encode_error
from .messages import DecodedText, DecodeTokens, EncodeChat, EncodeTexts, TokenRows, ToText


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
            with contextlib.suppress(NotUsableError):  # told to whoever asks for a chat
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
                return TokenRows([self._text.encode(text, asked.special) for text in asked.texts])
            return TokenRows(self._text.encode(asked.texts))
        if isinstance(asked, DecodeTokens) and isinstance(self._text, LLMTokenizer):
            return DecodedText(self._text.decode(asked.ids, asked.skip_special))
        raise InferError("a tokenizer of an encoder was asked for text")

    def _render(self, chat: dict[str, Any]) -> str:
        if self._template is None:
            raise no_template("this model")
        return self._template.render(chat.pop("messages"), tools=chat.pop("tools"), **chat)
