"""JSON values in streamed text: where they end, whether they are valid, and their members as they were written."""

from __future__ import annotations

import json
import re
from typing import Any

_ATOM = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null", re.ASCII)
_BLANK = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f\ud800-\udfff]*')  # of a string
_UNSENDABLE = re.compile("[\ud800-\udfff]")  # no UTF-8 has them
_DECODER = json.JSONDecoder()


class JsonScan:
    """Reads one JSON object that comes in pieces and checks it on the way (RFC 8259).

    `done`: its last brace was read; `broken`: what was read begins no JSON. `take` returns what was read. Line ends and
    other control characters in strings, which models write as they are, are escaped there. With `members` the object
    began earlier: its brace and a member were read.
    """

    def __init__(self, *, members: bool = False) -> None:
        self.done = self.broken = False
        self._open = ["{"] if members else []
        self._next = "after" if members else "value"  # also: first, key, colon, item
        self._quoted = self._escaped = False
        self._hex = 0  # digits to come of \uXXXX
        self._atom = ""  # number or name that is not yet complete
        self._taken: list[str] = []

    def take(self) -> str:
        text, self._taken = "".join(self._taken), []
        return text

    def feed(self, text: str, start: int = 0) -> int:
        """Read on from `start`; return the index after the last character that belongs to the value."""
        kept, at = start, start
        while at < len(text):
            if self._quoted and not (self._escaped or self._hex):
                plain = _PLAIN.match(text, at)
                at = plain.end() if plain else at
                if at == len(text):
                    break
            character = text[at]
            accepted = self._in_string(character) if self._quoted else self._between_strings(character)
            if not accepted:
                self.broken = True
                self._taken.append(text[kept:at])
                return at
            if character < " " and self._quoted or "\ud800" <= character <= "\udfff":
                self._taken += (text[kept:at], f"\\u{ord(character):04x}")
                kept = at + 1
            at += 1
            if self.done:
                self._taken.append(text[kept:at])
                return at
        self._taken.append(text[kept:])
        return len(text)

    def _in_string(self, character: str) -> bool:
        if self._hex:
            self._hex -= 1
            return character in "0123456789abcdefABCDEF"
        if self._escaped:
            self._escaped, self._hex = False, 4 if character == "u" else 0
            return character in '"\\/bfnrtu'
        self._escaped, self._quoted = character == "\\", character != '"'
        return True

    def _between_strings(self, character: str) -> bool:
        if self._atom:
            if character.isalnum() or character in "+-.":
                self._atom += character
                return len(self._atom) < 1 << 16
            whole, self._atom = _ATOM.fullmatch(self._atom), ""
            if whole is None:
                return False
        if character in " \t\r\n":
            return True
        wanted = self._next
        if character in "}]":
            closes = wanted == "after" or (wanted == "first" if character == "}" else wanted == "item")
            if not self._open or self._open.pop() != ("{" if character == "}" else "[") or not closes:
                return False
            self._next, self.done = "after", not self._open
            return True
        if character == '"' and wanted in ("first", "key"):
            self._quoted, self._next = True, "colon"
            return True
        if wanted in ("colon", "after"):
            after_comma = "key" if self._open[-1:] == ["{"] else "value"
            self._next = "value" if wanted == "colon" else after_comma
            return character == (":" if wanted == "colon" else ",")
        return wanted in ("value", "item") and self._begin_value(character)

    def _begin_value(self, character: str) -> bool:
        self._next = "after"
        if character in "{[":
            self._open.append(character)
            self._next = "first" if character == "{" else "item"
            return True
        if not self._open:  # the value itself is an object
            return False
        self._quoted = character == '"'
        self._atom = "" if self._quoted else character
        return self._quoted or character in "-0123456789tfn"


def members(text: str) -> dict[str, str] | None:
    """Return the members of a JSON object as JSON, by name; None for another text, or where a name is given twice."""
    found: dict[str, str] = {}
    if not isinstance(load(text), dict):
        return None
    at = _blank(text, _blank(text, 0) + 1)
    while text[at] != "}":
        name, at = _DECODER.raw_decode(text, at)
        start = _blank(text, _blank(text, at) + 1)
        _, stop = _DECODER.raw_decode(text, start)
        if name in found:
            return None
        found[name] = text[start:stop]
        at = _blank(text, stop)
        at = _blank(text, at + 1) if text[at] == "," else at
    return found


def whole_object(text: str) -> str | None:
    """Return a text that is one JSON object as UTF-8 can carry it; None for any other text."""
    scan, text = JsonScan(), text.strip()
    return scan.take() if text and scan.feed(text) == len(text) and scan.done else None


def quote(text: str) -> str:
    """Return a text as a JSON string that UTF-8 can carry."""
    return _UNSENDABLE.sub(lambda one: f"\\u{ord(one[0]):04x}", json.dumps(text, ensure_ascii=False))


def is_number(text: str) -> bool:
    """Return True for a number as JSON writes it."""
    return text not in ("true", "false", "null") and _ATOM.fullmatch(text) is not None


def load(text: str) -> Any:
    """Parse JSON; return None for text that is not valid JSON."""
    try:
        return json.loads(text, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return None


def _no_json(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _blank(text: str, at: int) -> int:
    found = _BLANK.match(text, at)
    return found.end() if found else at
