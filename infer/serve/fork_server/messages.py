"""Messages between the front, the fork server and its children: plain structs, msgpack, no pickle."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ...llm.text.grammar_request import GrammarLimits
from ...llm.text.grammar_trial import GrammarCost
from ..workers.messages import Failed

Job = Literal["trial", "text"]


class Prepare(msgspec.Struct, tag="prepare", frozen=True, array_like=True, kw_only=True):
    """To the fork server, first: open the tokenizer of this folder. Grammars need `vocab_size`; 0: there are none.
    `max_length`: of an encoder, whose texts are cut to it; 0: a language model, whose texts are not."""

    folder: str
    vocab_size: int = 0
    max_length: int = 0
    eos_ids: tuple[int, ...] = ()
    limits: GrammarLimits = GrammarLimits()


class Prepared(msgspec.Struct, tag="prepared", frozen=True, array_like=True):
    """From the fork server: it can fork. `unusable`: why grammars can't be compiled, or None."""

    unusable: Failed | None = None


class Fork(msgspec.Struct, tag="fork", frozen=True, array_like=True):
    """To the fork server, with a socket: a child that does this job for whoever has the socket's other end."""

    number: int
    job: Job


class Kill(msgspec.Struct, tag="kill", frozen=True, array_like=True):
    """To the fork server: end this child, if it runs."""

    number: int


class Ended(msgspec.Struct, tag="ended", frozen=True, array_like=True):
    """From the fork server: this child is no more. `status` as `os.waitstatus_to_exitcode` gives it."""

    number: int
    status: int


class Try(msgspec.Struct, tag="try", frozen=True, array_like=True):
    """To a child: compile this grammar and walk through it within `seconds` of CPU time, `politely` letting others go
    first; `GrammarCost` or `Failed` follows, or its end by SIGPROF."""

    kind: str
    value: Any
    seconds: float = 3.0
    politely: bool = False


ToServer = Prepare | Fork | Kill
FromServer = Prepared | Ended | Failed
FromTrial = GrammarCost | Failed


class Encode(msgspec.Struct, tag="encode", frozen=True, array_like=True):
    """To a child: token ids of these texts; `Rows` or `Failed` follows. SIGVTALRM ends a child whose tokenizer takes
    more than `seconds` of CPU time."""

    texts: list[str]
    special: bool
    seconds: float


class Chat(msgspec.Struct, tag="chat", frozen=True, array_like=True):
    """To a child: render `chat`, the arguments of `ChatTemplate.render` as JSON, and encode it; `Rows` or `Failed`
    follows. SIGPROF ends a child whose template takes more than `template_seconds` of CPU time."""

    chat: str
    template_seconds: float
    seconds: float


class Decode(msgspec.Struct, tag="decode", frozen=True, array_like=True):
    """To a child: the text of these token ids; `Said` or `Failed` follows."""

    ids: list[int]
    skip_special: bool
    seconds: float


class Rows(msgspec.Struct, tag="rows", frozen=True, array_like=True):
    rows: list[list[int]]


class Said(msgspec.Struct, tag="said", frozen=True, array_like=True):
    text: str


ToText = Encode | Chat | Decode
FromText = Rows | Said | Failed
