"""Strict JSON (RFC 8259): no NaN, duplicate keys or lone surrogates; bounded nesting."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from ...errors import InputError, UnsupportedMediaError

T = TypeVar("T")
PLAIN = frozenset((int, float, bool, type(None)))


class InvalidUnicodeError(InputError):
    """Invalid UTF-8, or a lone surrogate."""

    code = "invalid_unicode"


def require_json(headers: Mapping[bytes, bytes]) -> None:
    """Raise `UnsupportedMediaError` for a body whose Content-Type is not JSON."""
    media = headers.get(b"content-type", b"application/json").partition(b";")[0].strip().lower()
    if media != b"application/json":
        raise UnsupportedMediaError("the body must be JSON", hint="Send Content-Type: application/json")


def decode(text: bytes | bytearray | memoryview, to: type[T]) -> T:
    """Decode a JSON document to type `to`. Raises `InputError` with the path of the value."""
    return convert(parse(text), to)


def convert(value: object, to: type[T], *, strict: bool = True, where: str | None = None) -> T:
    """Convert a value of `parse` to type `to`; not `strict`: text to numbers too.

    Raises `InputError` with the path of what is wrong; `where`: place of the value, if it is a part of a request.
    """
    try:
        return msgspec.convert(value, to, strict=strict)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        path = path.rstrip("`")
        place = path if where is None else f"{where}{path.removeprefix('$')}".removeprefix(".")
        raise InputError(message, where=place) from error


def parse(text: bytes | bytearray | memoryview, *, max_depth: int = 64) -> Any:
    """Decode a JSON document to plain values. Raises `InputError`.

    msgspec refuses malformed text, but keeps the last of duplicate keys: so the colons of the text are compared with
    those that the decoded keys and strings need.
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
        if b"\\u" in document and _has_lone_surrogate(document):
            raise InvalidUnicodeError("a string has a lone surrogate") from error
        truncated = str(error) == "Input data was truncated"
        raise InputError("the JSON is truncated" if truncated else str(error)) from error


def _colons(value: dict[str, Any] | list[Any] | str, depth: int, deep: bool) -> int:
    """Count the colons that a value needs, or fewer: only the first item of a list of numbers or lists is counted.

    `deep`: the document has enough brackets to be nested too deeply, so every item is visited.
    """
    if isinstance(value, str):
        return value.count(":")
    if depth == 0:
        raise RecursionError
    if isinstance(value, list):
        if not value:
            return 0
        whole = set(map(type, value)) - PLAIN if deep else isinstance(value[0], dict | str)
        items: Iterable[Any] = value if whole else value[:1]
        total = 0
    else:
        items, total = value.values(), len(value)
        for name in value:
            total += name.count(":")
    for item in items:
        if isinstance(item, dict | list | str):
            total += _colons(item, depth - 1, deep)
    return total


def _refuse_duplicates(document: bytes) -> None:
    """Raise `InputError` for a duplicate key, by an exact second parse."""
    json.loads(document, object_pairs_hook=_unique, parse_int=len)


def _has_lone_surrogate(document: bytes) -> bool:
    """Return True if a string of the document has a lone surrogate."""
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
        raise InputError(f"duplicate key {twice[:64]!r} in a JSON object")
    return seen
