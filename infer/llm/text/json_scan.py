"""Boundaries of JSON values and of markers in streamed text."""

from __future__ import annotations

import json
from typing import Any


class Scan:
    """Finds where a JSON value ends that comes in pieces: the brace that closes as many as were opened."""

    def __init__(self, depth: int = 0) -> None:
        self.depth, self.quoted, self.escaped = depth, False, False

    def end(self, text: str, start: int) -> int:
        """Return the index after the value's last character, -1 while it is not there."""
        for at, character in enumerate(text[start:], start):
            if self.escaped:
                self.escaped = False
            elif self.quoted:
                self.escaped, self.quoted = character == "\\", character != '"'
            elif character == '"':
                self.quoted = True
            elif character in "{[":
                self.depth += 1
            elif character in "}]":
                self.depth -= 1
                if self.depth == 0:
                    return at + 1
        return -1


def num_held_back(text: str, marker: str) -> int:
    """Return how many of the last characters may belong to a marker, or to the blanks before one."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-size:]):
            return len(text) - len(text[:-size].rstrip())
    return len(text) - len(text.rstrip())


def load(text: str) -> Any:
    """Parse JSON; return None for text that is not valid JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
