"""Tool calls as Qwen3-Coder writes them: `<function=NAME><parameter=KEY>` value `</parameter></function>`.

Values are raw text, which may hold these very tags: an end counts where what must follow it does, and where it closes
no tag that the value opened itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .json_scan import load, quote

Calls = list[tuple[str, str]]  # names and their arguments as JSON
FUNCTION = re.compile(r"\s*<function=([^>\s]+)\s*>\s*")
_END = "</function>"
# In a block: the beginning of another one, an end, or what can only be the beginning of a call in JSON.
_BLOCK = re.compile(
    r"(?P<open><tool_call>\s*<function=[^>\s]+\s*>)|"
    r"(?P<close></function>\s*(?:</tool_call>|(?=<tool_call>\s*<function=)))|(?P<json><tool_call>\s*[\[{]\s*[{\"])"
)
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)\s*>")
_TAG = re.compile(r"<parameter=[^>\s]+\s*>|(?P<close></parameter>)")
_FOLLOWS = re.compile(r"\s*(?:<parameter=[^>\s]+\s*>|</function>\s*(?:<function=[^>\s]+\s*>|\Z))")
_MAX_REFERENCES = 16


def block_end(text: str, start: int, *, last: bool) -> int | None:
    """Return where the calls end that begin at `start`, 0 where they have no end, None while that is not known.

    An end is believed when another call follows, or nothing more: further ends show that a value held it.
    """
    depth, end = 1, 0
    for found in _BLOCK.finditer(text, start):
        if found["close"] is not None:
            depth = max(depth - 1, 0)
            end = end if depth else found.end()
        elif end:
            return end
        elif found["open"] is not None:
            depth += 1
    if not last:
        return None
    if not end and depth == 1 and text.rstrip().endswith(_END):  # without the end tag
        return len(text)
    return end


def read_calls(block: str, schemas: Mapping[str, Mapping[str, Any]]) -> Calls | None:
    """Return the calls of a block, with the end tag or without; None where it is malformed or ambiguous."""
    block = block.removesuffix("</tool_call>")
    return _read(block, schemas, balanced=True) or _read(block, schemas, balanced=False)


def _read(block: str, schemas: Mapping[str, Mapping[str, Any]], *, balanced: bool) -> Calls | None:
    """Read calls; `balanced`: a value closes the parameters that it opens."""
    calls: Calls = []
    at = 0
    while function := FUNCTION.match(block, at):
        name, at = function[1], function.end()
        values: dict[str, str] = {}
        while parameter := _PARAMETER.match(block, at):
            key, start = parameter[1], parameter.end()
            stop = _value_end(block, start, balanced=balanced)
            if stop is None or key in values:
                return None
            values[key] = block[start:stop].removeprefix("\n").removesuffix("\n")
            at = stop + len("</parameter>")
        if not block[at:].lstrip().startswith(_END):
            return None
        at = block.index(_END, at) + len(_END)
        schema = schemas.get(name, {})
        written = ", ".join(f"{quote(key)}: {_json(value, key, schema)}" for key, value in values.items())
        calls.append((name, f"{{{written}}}"))
    return calls if calls and not block[at:].strip() else None


def _value_end(block: str, start: int, *, balanced: bool) -> int | None:
    depth = 0
    for tag in _TAG.finditer(block, start):
        if tag["close"] is None:
            depth += balanced
        elif depth:
            depth -= 1
        elif _FOLLOWS.match(block, tag.end()):
            return tag.start()
    return None


def _json(text: str, key: str, schema: Mapping[str, Any]) -> str:
    """Return a value as JSON: a string where the schema of its parameter takes one, else what it is as JSON."""
    known = schema.get("properties")
    own = (
        known.get(key) if isinstance(known, Mapping) and key in known else schema.get("additionalProperties")
    )
    written, value = text.strip(), load(text)
    takes = _takes(own, schema)
    if takes is not None and not any(isinstance(one, str) for one in takes):
        if written.lower() in ("true", "false") and any(one is True for one in takes):
            return written.lower()
        takes = None
    if takes is not None:  # "null" and members of an enumeration have no other spelling than their own
        return written if text not in takes and _among(value, written, takes) else quote(text)
    return quote(text) if value is None and written != "null" else written


def _among(value: Any, written: str, takes: list[Any]) -> bool:
    """Return True for a value that the schema names itself and that is no string."""
    if value is None:
        return written == "null" and None in takes
    named = [one for one in takes if type(one) is type(value) and not isinstance(one, str | bool)]
    return value in named


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
