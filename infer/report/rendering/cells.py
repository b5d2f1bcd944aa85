"""Texts in HTML: words stay whole, paths and other long words may break, figures keep their units."""

from __future__ import annotations

import re
from html import escape

LONG = 24  # letters; a column is at least as wide as its longest word of no more
_AFTER = re.compile(r"(?<=[/\\._:,=&?+-])(?=[^/\\._:,=&?+-])")


def words_html(text: str) -> str:
    """Escape a text; a long word may break after its separators and, without room, anywhere; an option never."""
    return "".join(map(_word, re.split(r"(\s+)", text)))


def cell_html(text: str, *, right: bool = False) -> str:
    """Escape the text of a cell; a figure breaks only before a bracket. An empty cell stays empty."""
    if not right or not text:
        return words_html(text)
    return " ".join(f'<span class="whole">{escape(part)}</span>' for part in re.split(r" (?=[(\[])", text))


def _word(word: str) -> str:
    if word.startswith("--") and len(word) <= LONG:
        return f'<span class="whole">{escape(word)}</span>'
    if len(word) <= LONG:
        return escape(word)
    return f'<span class="long">{"<wbr>".join(map(escape, _AFTER.split(word)))}</span>'
