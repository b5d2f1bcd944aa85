"""Calls in tags, whose values are raw text: `<function=NAME><parameter=KEY>` value `</parameter></function>`.

A value may hold these very tags: an end counts where what must follow it does, and where it closes no tag that the
value opened itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import msgspec

from . import Attempt, CallGrammar, Reading, Refused, Schemas, ValueGrammar, Whole
from .json_scan import load, quote
from .schemas import argument_schemas, plain_text

Calls = list[tuple[str, str]]  # names and their arguments as JSON
_WORD = r"[^<>\"\s]+"
_MAX_REFERENCES = 16


class TagCalls(msgspec.Struct, frozen=True, dict=True):
    """Calls in tags: `call` with {name}, then for each argument `key` with {key}, its value, `value_end`; `call_end`.

    `block`: what stands around one call or more. Blanks next to tags mean nothing, but the line ends that `key` ends
    and `value_end` begins with are no part of a value. A call without tags of its own, as GLM's, names a known tool.
    """

    block: tuple[str, str]
    call: str
    key: str
    value_end: str
    call_end: str = ""

    def read(self, attempt: Attempt) -> Reading | None:
        text, start = attempt.text, attempt.start
        head = self._call.match(text, start)
        if head is None:
            begun = self._may_begin(text[start:])
            return None if begun and not attempt.last else Refused(start)
        if not attempt.takes(head[1]) or (not self.call_end and head[1] not in attempt.schemas):
            return Refused(start)
        stop = self._block_end(text, start, last=attempt.last)
        if stop is None:
            return None
        calls = self._calls(text[start:stop], attempt.schemas) if stop else None
        return Refused(stop or len(text)) if calls is None else Whole(calls, stop)

    def grammar(self, name: str, schema: dict[str, Any]) -> CallGrammar:
        values = []
        for key, own, required in argument_schemas(name, schema):
            texts = plain_text(name, key, own)
            value = ValueGrammar(
                before="\n" + self.key.format(key=key),
                after=self.value_end,
                schema=own if texts is None else None,
                texts=texts or [],
                required=required,
            )
            values.append(value)
        return CallGrammar(
            before=self.call.format(name=name), after=f"\n{self.call_end or self.block[1]}", values=values
        )

    @cached_property
    def _call(self) -> re.Pattern[str]:
        """Pattern of the begin of a call; without tags of its own, with what must follow."""
        after = "" if self.call_end else rf"(?=\s*(?:{self._key_tag}|{re.escape(self.block[1])}))"
        return re.compile(rf"\s*{_pattern(self.call)}\s*{after}")

    @cached_property
    def _key_tag(self) -> str:
        return _pattern(self.key.removesuffix("\n"))

    @cached_property
    def _key(self) -> re.Pattern[str]:
        return re.compile(rf"\s*{self._key_tag}")

    @cached_property
    def _tag(self) -> re.Pattern[str]:
        """Pattern of the begin and the end of a value."""
        return re.compile(rf"{self._key_tag}|(?P<close>{re.escape(self.value_end.strip())})")

    @cached_property
    def _follows(self) -> re.Pattern[str]:
        """Pattern of what may come behind a value."""
        more = rf"(?:\s*{_pattern(self.call)}|\s*\Z)" if self.call_end else r"\s*\Z"
        return re.compile(rf"\s*(?:{self._key_tag}|{re.escape(self.call_end)}{more})")

    @cached_property
    def _block(self) -> re.Pattern[str]:
        """Pattern, in a block: the begin of another one, an end, or what can only be the begin of a call in JSON."""
        opening, closing = (re.escape(tag) for tag in self.block)
        follows = "" if self.call_end else rf"\s*(?={self._key_tag}|{closing})"
        begin = rf"{opening}\s*{_pattern(self.call)}{follows}"
        end = rf"{re.escape(self.call_end)}\s*(?:{closing}|(?={begin}))" if self.call_end else closing
        return re.compile(rf'(?P<open>{begin})|(?P<close>{end})|(?P<json>{opening}\s*[\[{{]\s*[{{"])')

    def _may_begin(self, text: str) -> bool:
        """Return True for a text that is the begin of the begin of a call."""
        before, after = self.call.split("{name}")
        text = text.lstrip()
        if len(text) <= len(before):
            return before.startswith(text)
        named = re.match(_WORD, text[len(before) :]) if text.startswith(before) else None
        if named is None:
            return False
        rest = text[len(before) + named.end() :].lstrip()
        follows = (after,) if after else (self.key.split("{key}")[0], self.block[1])
        return any(tag.startswith(rest) or rest.startswith(tag) for tag in follows)

    def _block_end(self, text: str, start: int, *, last: bool) -> int | None:
        """Return where the calls end that begin at `start`, 0 where they have no end, None while that is not known.

        An end is believed when another call follows, or nothing more: further ends show that a value held it.
        """
        if not last and self.block[0] not in text[start:]:
            return None
        depth, end = 1, 0
        for found in self._block.finditer(text, start):
            if found["close"] is not None:
                depth = max(depth - 1, 0)
                end = end if depth else found.end()
            elif end:
                return end
            elif found["open"] is not None:
                depth += 1
        if not last:
            return None
        if not end and depth == 1 and self.call_end and text.rstrip().endswith(self.call_end):
            return len(text)  # without the end tag
        return end

    def _calls(self, block: str, schemas: Schemas) -> Calls | None:
        """Return the calls of a block, with the end tag or without; None where it is malformed or ambiguous."""
        block = block.removesuffix(self.block[1])
        return self._read(block, schemas, balanced=True) or self._read(block, schemas, balanced=False)

    def _read(self, block: str, schemas: Schemas, *, balanced: bool) -> Calls | None:
        """Read calls; `balanced`: a value closes the tags that it opens."""
        calls: Calls = []
        at = 0
        call = re.compile(rf"\s*{_pattern(self.call)}\s*")
        while function := call.match(block, at):
            name, at = function[1], function.end()
            values: dict[str, str] = {}
            while key := self._key.match(block, at):
                stop = self._value_end(block, key.end(), balanced=balanced)
                if stop is None or key[1] in values:
                    return None
                value = block[key.end() : stop].removeprefix("\n" if self.key.endswith("\n") else "")
                values[key[1]] = value.removesuffix("\n" if self.value_end.startswith("\n") else "")
                at = stop + len(self.value_end.strip())
            if not block[at:].lstrip().startswith(self.call_end):
                return None
            at = block.index(self.call_end, at) + len(self.call_end)
            schema = schemas.get(name, {})
            written = ", ".join(f"{quote(key)}: {_json(value, key, schema)}" for key, value in values.items())
            calls.append((name, f"{{{written}}}"))
            if not self.call_end:
                break
        return calls if calls and not block[at:].strip() else None

    def _value_end(self, block: str, start: int, *, balanced: bool) -> int | None:
        depth = 0
        for tag in self._tag.finditer(block, start):
            if tag["close"] is None:
                depth += balanced
            elif depth:
                depth -= 1
            elif self._follows.match(block, tag.end()):
                return tag.start()
        return None


def _pattern(tag: str) -> str:
    """Return a pattern of a tag with one field, whose word is a group; blanks in it are any blanks."""
    before, _, after = re.sub(r"\{\w+\}", "\0", tag).partition("\0")
    before, after = (r"\s*".join(map(re.escape, re.split(r"\s+", part))) for part in (before, after))
    return f"{before}({_WORD})" + (rf"\s*{after}" if after else "")


def _json(text: str, key: str, schema: Mapping[str, Any]) -> str:
    """Return a value as JSON: a string where the schema of its parameter takes one, else what it is as JSON."""
    known = schema.get("properties")
    own = (
        known.get(key) if isinstance(known, Mapping) and key in known else schema.get("additionalProperties")
    )
    written, value, takes = text.strip(), load(text), _takes(own, schema) or []
    is_json = value is not None or written == "null"
    if any(isinstance(one, str) for one in takes):
        # "null" and members of an enumeration have no other spelling than their own.
        kinds = [] if isinstance(value, str | bool) else [one for one in takes if type(one) is type(value)]
        return written if is_json and value in kinds and text not in takes else quote(text)
    if written.lower() in ("true", "false") and any(one is True for one in takes):
        return written.lower()
    return written if is_json else quote(text)


_EXAMPLES: dict[str, Any] = {"string": "", "boolean": True, "null": None}


def _takes(schema: Any, root: Mapping[str, Any], references: int = 0) -> list[Any] | None:
    """Return values that a schema takes, one of each simple type or those that it lists; None: it says nothing."""
    if not isinstance(schema, Mapping) or references > _MAX_REFERENCES:
        return None
    if isinstance(name := schema.get("$ref"), str) and name.startswith("#"):
        return _takes(_resolved(name, root), root, references + 1)
    if "const" in schema:
        return [schema["const"]]
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    nothing: list[Any] = [None] if schema.get("nullable") is True else []
    if (kind := schema.get("type")) is not None:
        kinds = kind if isinstance(kind, list) else [kind]
        return nothing + [_EXAMPLES.get(one, {}) for one in kinds if isinstance(one, str)]
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(choices := schema.get(name), list):
            found = [_takes(one, root, references + 1) for one in choices]
            said = [value for one in found if one is not None for value in one]
            return nothing + said if any(one is not None for one in found) else None
    return None


def _resolved(name: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for part in name[1:].strip("/").split("/") if name != "#" else ():
        part = part.replace("~1", "/").replace("~0", "~")
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
