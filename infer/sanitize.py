"""Sanitizing of untrusted text for terminals, responses and logs: bounded length, one line, printable."""

from __future__ import annotations

import unicodedata
from typing import Any

MAX_ERROR = 1024  # characters of an error text


def shortened(text: str, most: int) -> str:
    """Return `text` cut to `most` characters, at the end of a word where one is near, with … for the rest."""
    if len(text) <= most:
        return text
    cut = text[: most - 1]
    whole = cut.rpartition(" ")[0] if text[most - 1] != " " else cut
    return f"{(whole if len(whole) > most // 2 else cut).rstrip(' :,;(')}…"


def sanitize_text(text: str, most: int = MAX_ERROR) -> str:
    """Return `text` cut to `most` characters, with every unprintable character, line breaks included, escaped."""
    cut = shortened(text, most)
    if cut.isascii() and cut.isprintable():
        return cut
    return "".join(c if c == " " or unicodedata.category(c)[0] not in "CZ" else _escape(c) for c in cut)


def sanitize_values(value: Any, most: int = 1 << 16) -> Any:
    """Apply `sanitize_text` to every string, dictionary keys included, of decoded JSON."""
    if isinstance(value, str):
        return value if value.isprintable() and len(value) <= most else sanitize_text(value, most)
    if isinstance(value, dict):
        return {sanitize_values(key, most): sanitize_values(item, most) for key, item in value.items()}
    return [sanitize_values(item, most) for item in value] if isinstance(value, list) else value


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode()
