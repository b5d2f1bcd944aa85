"""Where JSON, or a marker, begins and ends in a text that comes in pieces."""

from __future__ import annotations

import json
from typing import Any


class Scan:
    """Finds where a JSON value ends that comes in pieces: the brace that closes as many as were opened."""

    def __init__(self, depth: int = 0) -> None:
        self.depth, self.quoted, self.escaped = depth, False, False

    def end(self, text: str, start: int) -> int:
        """The place after the last character, -1 when it is not there yet."""
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


def held(text: str, marker: str) -> int:
    """How many of the last characters may belong to a marker, or to the blanks before one."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-size:]):
            return len(text) - len(text[:-size].rstrip())
    return len(text) - len(text.rstrip())


def load(text: str) -> Any:
    """None for what is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
