"""Log-probabilities in OpenAI's two dialects: parallel lists of /v1/completions, objects of chat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ...llm.engine.requests import TokenLogprob
from .openai_types import Alternative, ChatLogprobs, CompletionLogprobs, ContentLogprob

LOWEST = -9999.0  # JSON has no minus infinity


def name(token: bytes) -> str:
    """The token as text; one that is only a part of a character by its bytes, so that no two look the same."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


class Lists:
    """Of one choice of /v1/completions; keeps where its text has come to."""

    def __init__(self, text: Any) -> None:
        self._bytes, self._special, self._offset = text.token_bytes, text.special, 0

    def of(
        self, prompt: Sequence[tuple[int, TokenLogprob | None]], new: Iterable[TokenLogprob]
    ) -> CompletionLogprobs:
        """`prompt`: tokens of an echoed prompt, and what is known of them."""
        lists = CompletionLogprobs([], [], [], [])
        for token, known in (*prompt, *((one.token_id, one) for one in new)):
            token_bytes = self._bytes(token)
            lists.text_offset.append(self._offset)
            if token not in self._special:
                self._offset += len(token_bytes.decode("utf-8", "ignore"))
            lists.tokens.append(name(token_bytes))
            lists.token_logprobs.append(None if known is None else max(known.logprob, LOWEST))
            if lists.top_logprobs is not None:
                lists.top_logprobs.append(None if known is None else self._top(known))
        return lists

    def _top(self, known: TokenLogprob) -> dict[str, float]:
        """The most likely, and the token itself."""
        found: dict[str, float] = {}
        for token, value in (*known.top, (known.token_id, known.logprob)):
            found.setdefault(name(self._bytes(token)), max(value, LOWEST))
        return found


def objects(text: Any, new: Iterable[TokenLogprob]) -> ChatLogprobs:
    """Of one choice of a chat."""
    content = []
    for one in new:
        token = text.token_bytes(one.token_id)
        top = [
            Alternative(name(other), max(value, LOWEST), list(other))
            for other, value in ((text.token_bytes(t), value) for t, value in one.top)
        ]
        content.append(ContentLogprob(name(token), max(one.logprob, LOWEST), list(token), top))
    return ChatLogprobs(content)
