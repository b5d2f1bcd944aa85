"""Log-probabilities in OpenAI's two formats: parallel lists for completions, objects for chat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ....llm.engine.requests import TokenLogprob

LOWEST = -9999.0  # JSON has no minus infinity


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists over the tokens of `text`; an echoed prompt's first token has no values."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


class Alternative(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Alternative]


class ChatLogprobs(msgspec.Struct):
    content: list[ContentLogprob]
    refusal: None = None


def token_text(token: bytes) -> str:
    """Return the token as text, or its bytes where it is a part of a character, so that names stay unique."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


class CompletionLogprobsBuilder:
    """Log-probabilities of one choice of /v1/completions, with its running text offset."""

    def __init__(self, text: Any) -> None:
        self._bytes, self._special, self._offset = text.token_bytes, text.special, 0

    def of(
        self, prompt: Sequence[tuple[int, TokenLogprob | None]], new: Iterable[TokenLogprob]
    ) -> CompletionLogprobs:
        """Return the lists for new tokens, after those of an echoed `prompt`."""
        lists = CompletionLogprobs([], [], [], [])
        for token, known in (*prompt, *((one.token_id, one) for one in new)):
            token_bytes = self._bytes(token)
            lists.text_offset.append(self._offset)
            if token not in self._special:
                self._offset += len(token_bytes.decode("utf-8", "ignore"))
            lists.tokens.append(token_text(token_bytes))
            lists.token_logprobs.append(None if known is None else max(known.logprob, LOWEST))
            if lists.top_logprobs is not None:
                lists.top_logprobs.append(None if known is None else self._top(known))
        return lists

    def _top(self, known: TokenLogprob) -> dict[str, float]:
        """Return the most likely tokens and the chosen one."""
        found: dict[str, float] = {}
        for token, value in (*known.top, (known.token_id, known.logprob)):
            found.setdefault(token_text(self._bytes(token)), max(value, LOWEST))
        return found


def chat_logprobs(text: Any, new: Iterable[TokenLogprob]) -> ChatLogprobs:
    """Return the log-probabilities of new tokens of one chat choice."""
    content = []
    for one in new:
        token = text.token_bytes(one.token_id)
        top = [
            Alternative(token_text(other), max(value, LOWEST), list(other))
            for other, value in ((text.token_bytes(t), value) for t, value in one.top)
        ]
        content.append(ContentLogprob(token_text(token), max(one.logprob, LOWEST), list(token), top))
    return ChatLogprobs(content)
