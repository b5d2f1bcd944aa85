"""Calls whose arguments are literals: Python's, `name(key="value", flags=[True])`, and Gemma's, `call:name{key:12}`."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from . import Attempt, CallGrammar, Reading, Refused, ValueGrammar, Whole
from .json_scan import is_number, quote
from .schemas import argument_schemas, plain_text, says_boolean

MAX_DEPTH = 64
UNMARKED = r"\[\s*(NAMES)\s*\("  # of any text that may be a call in a list
_STRING = re.compile(
    r'"""(?>[^"\\]+|\\.|"(?!""))*+"""|'
    r"'''(?>[^'\\]+|\\.|'(?!''))*+'''|"
    r'"(?!"")(?>[^"\\]+|\\.)*+"|'
    r"'(?!'')(?>[^'\\]+|\\.)*+'",
    re.DOTALL,
)
_ATOM = re.compile(r"[^\s,:=\[\](){}\"']+")
_KEY = re.compile(r"[\w-]+")
_BLANK = re.compile(r"\s*")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|(\n)|(.))", re.DOTALL)
_ESCAPED = {**dict(zip("abfnrtv0", "\a\b\f\n\r\t\v\0", strict=True)), **{one: one for one in "\\'\""}}
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}


class LiteralCalls(msgspec.Struct, frozen=True):
    """Calls as `before` NAME `opening` KEY `assign` VALUE, … `closing`.

    `delimiter`: what stands on both sides of a text, which has no escapes then; empty for Python's strings.
    """

    before: str = ""
    opening: str = "("
    assign: str = "="
    closing: str = ")"
    delimiter: str = ""

    def read(self, attempt: Attempt) -> Reading | None:
        text, start = attempt.text, attempt.start
        refused = Refused(start)
        head = text[start : start + len(self.before)]
        if head != self.before:
            return None if self.before.startswith(head) and not attempt.last else refused
        named = re.compile(rf"\s*([\w.-]{{1,64}})\s*{re.escape(self.opening)}").match(text, start + len(head))
        if named is None:
            begun = attempt.may_name(text[start + len(head) :].strip())
            return None if begun and not attempt.last else refused
        if not attempt.takes(named[1]):
            return refused
        before, attempt.scanned = attempt.scanned, len(text)
        if self.closing not in text[before:] and not attempt.last:
            return None  # the end can't have come: a long call is not read again for each piece of it
        literals = Literals(text, self)
        try:
            arguments, stop = literals.members(named.end(), self.closing, 0)
        except Incomplete:
            return refused if attempt.last else None
        except ValueError:
            return refused
        return Whole([(named[1], arguments)], stop)

    def grammar(self, name: str, schema: dict[str, Any]) -> CallGrammar:
        values = []
        for key, own, required in argument_schemas(name, schema):
            before = f"{key}{self.assign}"
            if says_boolean(own) and not self.delimiter:
                value = ValueGrammar(before=before, texts=["True", "False"], required=required)
            elif self.delimiter and (texts := plain_text(name, key, own)) is not None:
                mark = self.delimiter
                value = ValueGrammar(before=before + mark, after=mark, texts=texts, required=required)
            else:
                value = ValueGrammar(before=before, schema=own, required=required)
            values.append(value)
        separator = ", " if not self.delimiter else ","
        before = f"{self.before}{name}{self.opening}"
        return CallGrammar(before=before, after=self.closing, values=values, separator=separator)


class Incomplete(Exception):
    """A literal whose end has not come."""


class Literals:
    """Reader of literals in a text: each method returns JSON and the index behind it.

    Raises `Incomplete` at the end of the text, `ValueError` for what is no literal.
    """

    def __init__(self, text: str, syntax: LiteralCalls) -> None:
        self.text, self.syntax = text, syntax

    def members(self, at: int, closing: str, depth: int) -> tuple[str, int]:
        """Read `key: value` until `closing`; those of the call itself are assigned in the syntax's own way."""
        assign = ":" if depth else self.syntax.assign
        found: dict[str, str] = {}
        while self.text[at := self._skip(at)] != closing:
            key, at = self._key(at)
            at = self._expect(at, assign)
            value, at = self._value(at, depth)
            if key in found:
                raise ValueError(f"{key} is given twice")
            found[key] = value
            at = self._separated(at, closing)
        return "{" + ", ".join(f"{quote(key)}: {value}" for key, value in found.items()) + "}", at + 1

    def _items(self, at: int, closing: str, depth: int) -> tuple[str, int]:
        found = []
        while self.text[at := self._skip(at)] != closing:
            value, at = self._value(at, depth)
            found.append(value)
            at = self._separated(at, closing)
        return f"[{', '.join(found)}]", at + 1

    def _value(self, at: int, depth: int) -> tuple[str, int]:
        if depth > MAX_DEPTH:
            raise ValueError("nested too deep")
        at = self._skip(at)
        if (text := self._text(at)) is not None:
            return quote(text[0]), text[1]
        opening = self.text[at]
        if opening in "[(":
            return self._items(at + 1, "]" if opening == "[" else ")", depth + 1)
        if opening == "{":
            return self.members(at + 1, "}", depth + 1)
        atom = _ATOM.match(self.text, at)
        if atom is None:
            raise ValueError(f"no literal begins with {opening!r}")
        if atom.end() == len(self.text):
            raise Incomplete
        return _atom(atom[0]), atom.end()

    def _text(self, at: int) -> tuple[str, int] | None:
        """Read a string; None where none begins."""
        mark, text = self.syntax.delimiter, self.text
        if mark and text.startswith(mark, at):
            stop = text.find(mark, at + len(mark))
            if stop < 0:
                raise Incomplete
            return text[at + len(mark) : stop], stop + len(mark)
        if mark and len(text) - at < len(mark) and mark.startswith(text[at:]):
            raise Incomplete
        if text[at] not in "\"'":
            return None
        string = _STRING.match(text, at)
        if string is None or (string.end() == len(text) and len(string[0]) == 2):  # or the begin of """
            raise Incomplete
        size = 3 if len(string[0]) >= 6 and string[0][:3] in ('"""', "'''") else 1
        return _ESCAPE.sub(_unescaped, string[0][size:-size]), string.end()

    def _key(self, at: int) -> tuple[str, int]:
        if (text := self._text(at)) is not None:
            return text
        key = _KEY.match(self.text, at)
        if key is None:
            raise ValueError("no name of an argument")
        return key[0], key.end()

    def _skip(self, at: int) -> int:
        """Return the index of what follows the blanks."""
        blank = _BLANK.match(self.text, at)
        at = blank.end() if blank else at
        if at == len(self.text):
            raise Incomplete
        return at

    def _expect(self, at: int, character: str) -> int:
        if self.text[at := self._skip(at)] != character:
            raise ValueError(f"expected {character}")
        return at + 1

    def _separated(self, at: int, closing: str) -> int:
        at = self._skip(at)
        return at if self.text[at] == closing else self._expect(at, ",")


def _atom(text: str) -> str:
    """Return a word or a number as JSON."""
    if text in _WORDS:
        return _WORDS[text]
    if is_number(text):
        return text
    number = int(text, 0) if re.fullmatch(r"[+-]?(?:\d[\d_]*|0[xXoObB][\da-fA-F_]+)", text) else float(text)
    return json.dumps(number, allow_nan=False)


def _unescaped(escape: re.Match[str]) -> str:
    for code in escape.group(1, 2, 3):
        if code is not None:
            return chr(int(code, 16)) if int(code, 16) < 0x110000 else escape[0]
    return "" if escape[4] else _ESCAPED.get(escape[5], escape[0])
