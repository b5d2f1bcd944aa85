"""Log-probabilities in OpenAI's two formats: parallel lists for completions, objects for chat."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

import msgspec

from ....llm.engine.requests import TokenLogprob
from ....llm.text.tokenizer import LLMTokenizer

LOWEST = -9999.0  # JSON has no minus infinity
CONTEXT = 4  # tokens of a prompt in which a character may begin


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
    """Log-probabilities of one choice of /v1/completions, with its running text offset.

    The offset of a token is that of the character that it begins in, or goes on with. `prompt` comes before the
    choice, as `echo` where that is shown; `skip_special`: the choice's text is without special tokens.
    """

    def __init__(
        self, text: LLMTokenizer, prompt: Sequence[int] = (), echo: str = "", *, skip_special: bool = True
    ) -> None:
        self._bytes, self._special = text.token_bytes, text.special
        self._prompt, self._echo, self._skip = prompt[-CONTEXT:], echo, skip_special
        self._decoder: codecs.IncrementalDecoder | None = None  # of the choice's own tokens
        self._offset = 0

    def of(
        self, prompt: Sequence[tuple[int, TokenLogprob | None]], new: Sequence[TokenLogprob]
    ) -> CompletionLogprobs:
        """Return the lists for new tokens, after those of an echoed `prompt`."""
        lists = CompletionLogprobs(self._prompt_offsets([token for token, _ in prompt]), [], [], [])
        if self._decoder is None:
            self._decoder, self._offset = _utf8(), len(self._echo)
            for token in self._prompt:  # a character that it begins goes on in the choice
                self._decoded(self._decoder, token, skip=self._skip)
        for one in new:
            lists.text_offset.append(self._offset)
            self._offset += len(self._decoded(self._decoder, one.token_id, skip=self._skip))
        for token, known in (*prompt, *((one.token_id, one) for one in new)):
            lists.tokens.append(token_text(self._bytes(token)))
            lists.token_logprobs.append(None if known is None else max(known.logprob, LOWEST))
            if lists.top_logprobs is not None:
                lists.top_logprobs.append(None if known is None else self._top(known))
        return lists

    def _prompt_offsets(self, tokens: Sequence[int]) -> list[int]:
        """Return the offsets of an echoed prompt, of which some tokenizers drop the first blank."""
        decoder, offsets, text = _utf8(), list[int](), ""
        for token in tokens:
            offsets.append(len(text))
            text += self._decoded(decoder, token, skip=True)
        dropped = len(text) - len(self._echo) if text.endswith(self._echo) else 0
        return [max(offset - dropped, 0) for offset in offsets]

    def _decoded(self, decoder: codecs.IncrementalDecoder, token: int, *, skip: bool) -> str:
        return "" if skip and token in self._special else decoder.decode(self._bytes(token))

    def _top(self, known: TokenLogprob) -> dict[str, float]:
        """Return the most likely tokens and the chosen one."""
        found: dict[str, float] = {}
        for token, value in (*known.top, (known.token_id, known.logprob)):
            found.setdefault(token_text(self._bytes(token)), max(value, LOWEST))
        return found


def chat_logprobs(text: LLMTokenizer, new: Iterable[TokenLogprob]) -> ChatLogprobs:
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


def _utf8() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")
