"""Messages between the server and the processes of a tokenizer: plain structs, msgpack, no pickle."""

from __future__ import annotations

from typing import Any

import msgspec

from ...llm.text.grammar.grammar_request import GrammarLimits
from ...llm.text.grammar.grammar_trial import GrammarCost
from ...process.error_messages import ErrorMessage
from .texts import Method

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


class CallTexts(msgspec.Struct, tag="call", frozen=True, array_like=True):
    """Server to child: call this method of `GeneratorTexts` or `EncoderTexts`; `TextsAnswer` or `ErrorMessage` follows.

    SIGVTALRM ends a child that takes more than `seconds` of CPU time.
    """

    method: Method
    arguments: tuple[Any, ...]
    seconds: float


class EncodeChat(msgspec.Struct, tag="chat", frozen=True, array_like=True):
    """Server to child: render `chat` and tokenize it; answered like `encode` of one text.

    `chat`: arguments of `GeneratorTexts.render` as JSON. SIGPROF ends a child whose template takes more than
    `template_seconds` of CPU time.
    """

    chat: str
    template_seconds: float
    seconds: float


class TextsAnswer(msgspec.Struct, tag="answer", frozen=True, array_like=True):
    """Child to server: the result of a method, as plain values."""

    value: Any


ToText = CallTexts | EncodeChat
FromText = TextsAnswer | ErrorMessage
