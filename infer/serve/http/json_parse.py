"""JSON as RFC 8259 means it: no NaN, no duplicate names, no lone surrogates, no bottomless nesting."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec

from ...errors import InputError

T = TypeVar("T")
PLAIN = frozenset((int, float, bool, type(None)))


class InvalidUnicodeError(InputError):
    """Bytes that are no UTF-8, or half of a pair of surrogates."""

    code = "invalid_unicode"


def decode(text: bytes | bytearray | memoryview, to: type[T], *, max_depth: int = 64) -> T:
    """The JSON document as a `to`; raises `InputError` naming the place."""
    return convert(parse(text, max_depth=max_depth), to)


def convert(value: Any, to: type[T]) -> T:
    """What `parse` gave, as a `to`; raises `InputError` naming the place."""
    try:
        return msgspec.convert(value, to)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `")
        raise InputError(message, where=where.rstrip("`")) from error


def parse(text: bytes | bytearray | memoryview, *, max_depth: int = 64) -> Any:
    """The JSON document as plain values; raises `InputError`.

    msgspec refuses malformed text, but keeps the last of two equal names: colons are counted against names.
    """
    document = bytes(text)
    if not document:
        raise InputError("expected a JSON body, got an empty one")
    try:
        value = msgspec.json.decode(document)
        deep = document.count(b"[") + document.count(b"{") > max_depth
        held = _colons(value, max_depth, deep) if isinstance(value, dict | list) else 0
        if held != document.count(b":") or b"\\u" in document:
            _refuse_duplicates(document)
        return value
    except UnicodeDecodeError as error:
        raise InvalidUnicodeError("the body is not valid UTF-8") from error
    except RecursionError as error:
        raise InputError(f"JSON nested deeper than {max_depth}") from error
    except MemoryError as error:
        raise InputError("the JSON holds more values than fit into memory") from error
    except msgspec.DecodeError as error:
        if document.startswith(b"\xef\xbb\xbf"):
            raise InputError("the JSON begins with a byte order mark") from error
        if b"\\u" in document and _half_a_pair(document):
            raise InvalidUnicodeError("a text holds a lone surrogate") from error
        cut = str(error) == "Input data was truncated"
        raise InputError("the JSON is cut short" if cut else str(error)) from error


def _colons(value: Any, depth: int, deep: bool) -> int:
    """Colons that the document must hold, or fewer: of lists of numbers, or of lists, only the first item counts.

    `deep`: the document has brackets enough to be nested too deeply; then every item is looked into.
    """
    if isinstance(value, str):
        return value.count(":")
    if depth == 0:
        raise RecursionError
    if isinstance(value, list):
        if not value:
            return 0
        whole = set(map(type, value)) - PLAIN if deep else isinstance(value[0], dict | str)
        items, total = value if whole else value[:1], 0
    else:
        items, total = value.values(), len(value)
        for name in value:
            total += name.count(":")
    for item in items:
        if isinstance(item, dict | list | str):
            total += _colons(item, depth - 1, deep)
    return total


def _refuse_duplicates(document: bytes) -> None:
    """The exact answer, at the price of a second parse."""
    json.loads(document, object_pairs_hook=_unique, parse_int=len)


def _half_a_pair(document: bytes) -> bool:
    """Whether a text in it holds half of a pair, as far as it can be read at all."""
    try:
        json.dumps(json.loads(document, parse_int=len), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    except (ValueError, RecursionError):
        return False
    return False


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen = dict(pairs)
    if len(seen) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"the name {twice[:64]!r} stands twice in one JSON object")
    return seen
