"""Syntaxes of tool calls: how a call is read out of text that is still coming, and how a grammar writes one.

A syntax is data with two methods. `read` looks at an `Attempt`, the text from where a call may begin, and returns a
`Reading`, or None where more text must decide. It reads nothing but that text, so that what it finds does not depend on
how the text was cut. `grammar` returns the parts of a call of one tool.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from .json_scan import JsonScan

Schemas = Mapping[str, Mapping[str, Any]]  # of the arguments of each tool, by its name
NAME = r"[\w.-]{1,64}"


class Attempt:
    """Text in which a call may begin at `start`, looked for from `begin` on; `placed`: `start` is behind the blanks.

    `sure`: a mark came before it, so that also calls of unknown tools are calls; `again`: a call came before it.
    `last`: nothing comes after the text.
    """

    def __init__(self, text: str, start: int, schemas: Schemas, *, sure: bool, again: bool = False) -> None:
        self.text, self.begin, self.start, self.schemas, self.sure = text, start, start, schemas, sure
        self.again, self.last, self.placed = again, False, again
        self.scan, self.scanned = JsonScan(), start  # of a reader that goes on where it stopped

    def takes(self, name: Any) -> bool:
        """Return True for a name that a call may have here."""
        known = isinstance(name, str) and (self.sure or name in self.schemas)
        return known and bool(name) and not re.search("[\ud800-\udfff]", name)

    def may_name(self, text: str) -> bool:
        """Return True for a text with which the name of a call may begin here."""
        return re.fullmatch(r"[\w.-]{0,64}", text) is not None and (
            self.sure or any(name.startswith(text) for name in self.schemas)
        )


class Begun(msgspec.Struct, frozen=True):
    """Call whose arguments, a JSON object, begin at `stop`; `enclosed` in an object whose other members follow them."""

    name: str
    stop: int
    id: str | None = None
    enclosed: bool = False


class Whole(msgspec.Struct, frozen=True):
    """Calls that end at `stop`: names, and arguments as JSON."""

    calls: list[tuple[str, str]]
    stop: int


class Message(msgspec.Struct, frozen=True):
    """Header of a message, which ends at `stop`: of a thought, or else of content."""

    stop: int
    thought: bool


class Refused(msgspec.Struct, frozen=True):
    """No call: text that stays as it is, until `stop`; `broken`: calls in what follows are quoted."""

    stop: int
    broken: bool = False


Reading = Begun | Whole | Message | Refused


class ValueGrammar(msgspec.Struct, frozen=True, kw_only=True):
    """An argument: `before`, JSON that is valid under `schema` or one of `texts`, `after`.

    With neither it is any text before the first `after`.
    """

    before: str
    after: str = ""
    schema: dict[str, Any] | None = None
    texts: list[str] = []
    required: bool = True


class CallGrammar(msgspec.Struct, frozen=True, kw_only=True):
    """A call of one tool: `before`, JSON that is valid under `schema` or else `values` in their order, `after`."""

    before: str
    after: str = ""
    schema: dict[str, Any] | None = None
    values: list[ValueGrammar] = []
    separator: str = ""


class Syntax(Protocol):
    """Syntax in which a form writes a call."""

    def read(self, attempt: Attempt) -> Reading | None:
        """Return what begins at `attempt.start`; None where more text must decide, never for the last text."""

    def grammar(self, name: str, schema: dict[str, Any]) -> CallGrammar:
        """Return the parts of a call of a tool; `InputError` for a schema that this syntax can't enforce."""
