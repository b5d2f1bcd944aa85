"""Messages between the server and the processes of a tokenizer: plain structs, msgpack, no pickle."""

from __future__ import annotations

from typing import Any

import msgspec

from ...llm.text.grammar.grammar_request import GrammarLimits
from ...llm.text.grammar.grammar_trial import GrammarCost
from ...process.error_messages import ErrorMessage

FromTrial = GrammarCost | ErrorMessage


class TokenizerConfig(msgspec.Struct, tag="prepare", frozen=True, array_like=True, kw_only=True):
    """Server to fork server, first message: open the tokenizer of this folder.

    `vocab_size`: for grammars; 0 disables them. `max_length`: truncation length of an encoder's texts; 0 for
    a language model.
    """

    folder: str
    vocab_size: int = 0
    max_length: int = 0
    eos_ids: tuple[int, ...] = ()
    limits: GrammarLimits = GrammarLimits()


class CompileTrial(msgspec.Struct, tag="try", frozen=True, array_like=True):
    """Server to child: compile this grammar and walk through it within `seconds` of CPU time.

    `politely`: at lower priority. `GrammarCost` or `ErrorMessage` follows, or its end by SIGPROF.
    """

    kind: str
    value: Any
    seconds: float = 3.0
    politely: bool = False


class EncodeTexts(msgspec.Struct, tag="encode", frozen=True, array_like=True):
    """Server to child: tokenize these texts or, for an encoder, pairs of texts; `TokenRows` or `ErrorMessage` follows.

    SIGVTALRM ends a child whose tokenizer takes more than `seconds` of CPU time.
    """

    texts: list[str | tuple[str, str]]
    special: bool
    seconds: float


class EncodeChat(msgspec.Struct, tag="chat", frozen=True, array_like=True):
    """Server to child: render `chat` and tokenize it; `TokenRows` or `ErrorMessage` follows.

    `chat`: arguments of `ChatTemplate.render` as JSON. SIGPROF ends a child whose template takes more than
    `template_seconds` of CPU time.
    """

    chat: str
    template_seconds: float
    seconds: float


class DecodeTokens(msgspec.Struct, tag="decode", frozen=True, array_like=True):
    """Server to child: decode these token ids; `DecodedText` or `ErrorMessage` follows."""

    ids: list[int]
    skip_special: bool
    seconds: float


class EncodeSpans(msgspec.Struct, tag="spans", frozen=True, array_like=True):
    """Server to child: tokenize texts, or a question and its context in windows; `SpanRows` or `ErrorMessage` follows.

    SIGVTALRM ends a child whose tokenizer takes more than `seconds` of CPU time.
    """

    texts: list[str]
    question: str | None
    seconds: float


class FindTokens(msgspec.Struct, tag="find", frozen=True, array_like=True):
    """Server to child: the ids of these tokens, as the vocabulary spells them; `TokenIds` follows."""

    tokens: list[str]
    seconds: float


class TokenIds(msgspec.Struct, tag="found", frozen=True, array_like=True):
    """Id of each token asked for, None for one that the vocabulary lacks."""

    ids: list[int | None]


class DecodeRows(msgspec.Struct, tag="decode rows", frozen=True, array_like=True):
    """Server to child: decode rows of an encoder's token ids; `DecodedRows` or `ErrorMessage` follows.

    Each row has True beside it where special tokens are left out.
    """

    rows: list[tuple[list[int], bool]]
    seconds: float


class DecodedRows(msgspec.Struct, tag="said rows", frozen=True, array_like=True):
    texts: list[str]


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


class SpanRows(msgspec.Struct, tag="spanned", frozen=True, array_like=True):
    rows: list[SpanRow]


class TokenRows(msgspec.Struct, tag="rows", frozen=True, array_like=True):
    """Token ids of each text; `types`: the token types of each pair, empty without pairs."""

    rows: list[list[int]]
    types: list[list[int]] = []


class DecodedText(msgspec.Struct, tag="said", frozen=True, array_like=True):
    text: str


ToText = EncodeTexts | EncodeSpans | EncodeChat | DecodeTokens | FindTokens | DecodeRows
FromText = TokenRows | SpanRows | DecodedText | TokenIds | DecodedRows | ErrorMessage
