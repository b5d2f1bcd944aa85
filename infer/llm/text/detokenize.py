"""Incremental detokenization: the text of each token, joined, is what the tokenizer decodes at once.

The text of a completion continues its prompt: `decode(prompt + output)` without `decode(prompt)`, so that a tokenizer
that drops the first space of a text drops none in the middle.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from .tokenizer import BYTE_LEVEL

if TYPE_CHECKING:
    import tokenizers

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_REPLACEMENT = "\ufffd"
_CONTEXT = (
    16  # tokens of the prompt that decide how the next one is written: an unfinished run of bytes, for one
)


class Detokenizer(Protocol):
    """Text of one completion, token by token."""

    def push(self, token: int) -> str:
        """Return the text that is complete now; it never ends within a character."""

    def flush(self) -> str:
        """Return the rest at the end; an incomplete character is U+FFFD."""


class DetokenizerFactory:
    """Makes the detokenizers of one tokenizer; shared by all completions."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        from tokenizers import decoders

        self.tokenizer = tokenizer
        self.special = frozenset(
            token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special
        )
        self.byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._bytes: dict[int, bytes] = {}

    def start(self, prompt: Sequence[int], *, skip_special: bool = True) -> Detokenizer:
        """Return a detokenizer for the completion of `prompt`."""
        kind = _ByteLevelDetokenizer if self.byte_level else _WindowDetokenizer
        stream: Detokenizer = kind(self, skip_special)
        for token in prompt[-_CONTEXT:]:
            stream.push(token)
        return stream

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token of a byte-level tokenizer; empty for an unknown id."""
        found = self._bytes.get(token)
        if found is None:
            text = self.tokenizer.id_to_token(token) or ""
            codes = [BYTE_LEVEL.get(character, -1) for character in text]
            found = self._bytes[token] = text.encode() if -1 in codes else bytes(codes)
        return found


class _ByteLevelDetokenizer:
    """Detokenizer of byte-level tokens: each stands for bytes, independent of its neighbours."""

    def __init__(self, pieces: DetokenizerFactory, skip_special: bool) -> None:
        self._detokenizers = pieces
        self._skipped = pieces.special if skip_special else frozenset()
        self._decoder: Any = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return "" if token in self._skipped else self._decoder.decode(self._detokenizers.bytes_of(token))

    def flush(self) -> str:
        text = self._decoder.decode(b"", True)
        self._decoder.reset()
        return text


class _WindowDetokenizer:
    """Detokenizer that decodes the tokens since the last shown one, together with that one for its spaces.

    A run of byte tokens is shown when it has ended: one byte that fits no character turns the whole run into U+FFFD.
    """

    def __init__(self, pieces: DetokenizerFactory, skip_special: bool) -> None:
        self._detokenizers, self._skip = pieces, skip_special
        self._skipped = pieces.special if skip_special else frozenset()
        self._before: list[int] = []
        self._new: list[int] = []
        self._shown = ""  # the text of `_before` alone

    def push(self, token: int) -> str:
        name = self._detokenizers.tokenizer.id_to_token(token)
        if name is None or token in self._skipped:
            return ""
        self._new.append(token)
        return "" if _BYTE.fullmatch(name) else self._show()

    def _show(self) -> str:
        text = self._decode(self._before + self._new)
        if text.endswith(_REPLACEMENT) or not text.startswith(self._shown):
            return ""
        new = text[len(self._shown) :]
        self._before, self._new = self._new[-1:], []
        self._shown = self._decode(self._before)
        return new

    def flush(self) -> str:
        text = self._decode(self._before + self._new)
        new = text[len(self._shown) :] if self._new else ""
        self._before, self._new, self._shown = [], [], ""
        return new

    def _decode(self, tokens: list[int]) -> str:
        return self._detokenizers.tokenizer.decode(tokens, skip_special_tokens=self._skip)
