"""Work on texts with the tokenizer and chat template of a model, wherever it is done: in the server, or in a child."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from ...llm.text.chat_template import ChatTemplate, no_template
from ...llm.text.tokenizer import LLMTokenizer, TextOrPair, Tokenizer

Method = Literal["encode", "encode_typed", "encode_spans", "find_tokens", "decode"]
DecodedRow = tuple[Sequence[int], bool]  # token ids, and True where special tokens are left out


class TokenRows(NamedTuple):
    """Token ids of each text; `types`: the token types of each pair, empty without pairs."""

    rows: list[list[int]]
    types: list[list[int]] = []


class SpanRow(msgspec.Struct, frozen=True, array_like=True):
    """A tokenized text: the fields of a `tokenizers.Encoding` that answers with places in the text need."""

    ids: list[int]
    type_ids: list[int]
    offsets: list[tuple[int, int]]
    special_tokens_mask: list[int]
    sequence_ids: list[int | None]
    tokens: list[str]

    @classmethod
    def of(cls, encoding: Any) -> SpanRow:
        return cls(*(getattr(encoding, name) for name in cls.__struct_fields__))


class GeneratorTexts:
    """Texts of a language model."""

    def __init__(self, tokenizer: LLMTokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer, self._template = tokenizer, template

    def encode(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        return [self._tokenizer.encode(text, special) for text in texts]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> str:
        """Return the prompt of a conversation."""
        if self._template is None:
            raise no_template("this model")
        return self._template.render(messages, tools=tools, **options)

    def decode(self, rows: Sequence[DecodedRow]) -> list[str]:
        return [self._tokenizer.decode(*row) for row in rows]


class EncoderTexts:
    """Texts of a tensor model, cut to the length that it reads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode_typed(self, texts: Sequence[TextOrPair]) -> TokenRows:
        """Return the ids and the token types of each text or pair."""
        rows, types = self._tokenizer.encode_typed(texts)
        return TokenRows(rows, [] if all(isinstance(text, str) for text in texts) else types)

    def encode_spans(self, texts: Sequence[str], question: str | None) -> list[SpanRow]:
        """Return texts, or the windows of a question's context, with the places of their tokens."""
        return [SpanRow.of(encoding) for encoding in self._tokenizer.span_encodings(texts, question)]

    def find_tokens(self, tokens: Sequence[str]) -> list[int | None]:
        """Return the ids of tokens as the vocabulary spells them, None for one that it lacks."""
        return [self._tokenizer.token_id(token) for token in tokens]

    def decode(self, rows: Sequence[DecodedRow]) -> list[str]:
        return [self._tokenizer.decode(*row) for row in rows]
