"""Calls whose arguments are a JSON object: in an object with a name, or behind a header that names the tool."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from . import Attempt, Begun, CallGrammar, Message, Reading, Refused, Whole
from .json_scan import load, members, whole_object

MAX_HEADER = 256  # characters
UNMARKED = r'\{(?s:.*)(\\u|"name"\s*:\s*"(NAMES)")'  # of any JSON that may be a call; names may be escaped
_ID = r'"(?:id|type)"\s*:\s*"(?:[^"\\]|\\.)*"\s*,\s*'
_HEADER = re.compile(
    rf'\{{\s*(?:{_ID})*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*(?:{_ID})*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_KEYS = '(?!(?:name|type|id|arguments|parameters|function)")[^"]*"'
_OTHER = re.compile(rf'\{{\s*(?:"name"\s*:\s*(?:[^"\s]|"(?:[^"\\]|\\.)*"\s*(?:\}}|,\s*"{_KEYS}))|"{_KEYS})')


class JsonCalls(msgspec.Struct, frozen=True):
    """Calls as `{"name": …, "arguments": {…}}`, members in any order; `key`: the member that constraints write."""

    key: str = "arguments"

    def read(self, attempt: Attempt) -> Reading | None:
        text, start = attempt.text, attempt.start
        if not text.startswith("{", start):
            return Refused(start)
        if header := _HEADER.match(text, start):
            name = load(header[1])
            return Begun(name, header.end(), enclosed=True) if attempt.takes(name) else Refused(start)
        if not attempt.sure and _OTHER.match(text, start):
            return Refused(start)
        scan = attempt.scan
        attempt.scanned = scan.feed(text, attempt.scanned)
        if not scan.done:
            broken = scan.broken
            return Refused(attempt.scanned, broken=broken) if broken or attempt.last else None
        call = _call_of(scan.take(), attempt)
        return Refused(attempt.scanned) if call is None else Whole([call], attempt.scanned)

    def grammar(self, name: str, schema: dict[str, Any]) -> CallGrammar:
        return CallGrammar(before=f'{{"name": "{name}", "{self.key}": ', after="}", schema=schema)


def _call_of(text: str, attempt: Attempt) -> tuple[str, str] | None:
    """Return name and arguments of a call whose members come in any order, or in a member "function"."""
    found = members(text)
    if found is not None and found.get("function", "").startswith("{"):
        found = members(found["function"])
    name = load((found or {}).get("name", ""))
    if found is None or not attempt.takes(name) or {"arguments", "parameters"} <= found.keys():
        return None
    absent = "{}" if attempt.sure else ""
    written = found.get("arguments", found.get("parameters", absent))
    if written.startswith('"'):
        written = load(written).strip() or "{}"
    arguments = whole_object("{}" if written == "null" else written)
    return None if arguments is None else (name, arguments)


class NamedCalls(msgspec.Struct, frozen=True):
    """Calls as a header and JSON arguments.

    `header`: a regular expression of all before the brace, with the group `name` and maybe `id`; it begins with `mark`,
    or follows the mark of the form. Constraints write it as `written` with {name}, and `end` behind the arguments.
    """

    header: str
    written: str
    end: str = ""
    mark: str = ""

    def read(self, attempt: Attempt) -> Reading | None:
        start = attempt.start
        if not attempt.text.startswith(self.mark, start) or (attempt.again and not self.mark):
            begun = self.mark.startswith(attempt.text[start:]) and bool(self.mark) and not attempt.last
            return None if begun else Refused(start)
        brace = attempt.text.find("{", start, start + MAX_HEADER)
        if brace < 0:
            wait = len(attempt.text) < start + MAX_HEADER and not attempt.last
            return None if wait else Refused(start)
        header = re.compile(self.header).fullmatch(attempt.text, start, brace)
        if header is None or not attempt.takes(header["name"]):
            return Refused(start)
        return Begun(header["name"], brace, header.groupdict().get("id"))

    def grammar(self, name: str, schema: dict[str, Any]) -> CallGrammar:
        return CallGrammar(before=self.written.format(name=name), after=self.end, schema=schema)


class ChannelCalls(msgspec.Struct, frozen=True):
    """Messages with a channel, as gpt-oss writes them: `<|channel|>analysis<|message|>`.

    One to `functions.NAME` is a call with JSON arguments; another one of the channel `thought` is a thought.
    """

    middle: str = "<|message|>"
    thought: str = "analysis"

    def read(self, attempt: Attempt) -> Reading | None:
        text, start = attempt.text, attempt.start
        stop = text.find(self.middle, start, start + MAX_HEADER)
        if stop < 0:
            wait = len(text) < start + MAX_HEADER and not attempt.last
            return None if wait else Refused(start)
        header, stop = text[start:stop], stop + len(self.middle)
        if (called := re.search(r"\bto=functions\.([\w.-]{1,64})", header)) and attempt.schemas:
            body = text[stop:].lstrip()
            if not body and not attempt.last:
                return None
            return Begun(called[1], len(text) - len(body)) if body.startswith("{") else Message(stop, False)
        return Message(stop, re.search(rf"\b{self.thought}\b", header) is not None)

    def grammar(self, name: str, schema: dict[str, Any]) -> CallGrammar:
        before = f"<|channel|>commentary to=functions.{name} <|constrain|>json{self.middle}"
        return CallGrammar(before=before, after="<|call|>", schema=schema)
