"""Texts that others had a hand in, fit for a terminal, an answer or a log: bounded, in one line, nothing invisible."""

from __future__ import annotations

import unicodedata
from typing import Any

MAX_ERROR = 1024  # characters of an error text


def plain(text: str, most: int = MAX_ERROR) -> str:
    """At most `most` characters; whatever is no visible character, line breaks included, as an escape."""
    cut = text if len(text) <= most else text[: most - 1] + "…"
    if cut.isascii() and cut.isprintable():
        return cut
    return "".join(c if c == " " or unicodedata.category(c)[0] not in "CZ" else _escape(c) for c in cut)


def plain_values(found: Any, most: int = 1 << 16) -> Any:
    """Decoded JSON with every string, keys too, made `plain`."""
    if isinstance(found, str):
        return found if found.isprintable() and len(found) <= most else plain(found, most)
    if isinstance(found, dict):
        return {plain_values(key, most): plain_values(value, most) for key, value in found.items()}
    return [plain_values(value, most) for value in found] if isinstance(found, list) else found


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode()
