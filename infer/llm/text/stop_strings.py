"""Stop strings: found across token borders; text that may begin one is held back until it is known."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from .detokenize import Detokenizer


class StopStrings:
    """Search for stop strings in text of any chunks; the result does not depend on the chunks.

    The stop string that is complete first ends the text; of two that end together the longer one.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self.stops, self.include = tuple(stops), include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that may be shown now, and the stop string that was met."""
        if not self.stops:
            return text, None
        held = self._held + text
        met = min(
            ((at + len(stop), at, stop) for stop in self.stops if (at := held.find(stop)) >= 0), default=None
        )
        if met is not None:
            end, start, stop = met
            self._held = ""
            return held[: end if self.include else start], stop
        keep = begin_at_end(self.stops, held)
        self._held = held[keep:]
        return held[:keep], None

    def skip(self, text: str) -> str:
        """Show text without a search for stop strings."""
        held, self._held = self._held + text, ""
        return held

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def begin_at_end(marks: tuple[str, ...], text: str) -> int:
    """Return where the longest end of a text begins that is a part of one of the marks from its beginning, not all."""
    first, longest = _first_characters(marks)
    for start in range(max(len(text) - longest + 1, 0), len(text)):
        if text[start] in first:
            end = text[start:]
            if any(mark.startswith(end) and mark != end for mark in marks):
                return start
    return len(text)


@lru_cache(256)
def _first_characters(marks: tuple[str, ...]) -> tuple[frozenset[str], int]:
    """Return the characters with which marks begin, and the length of the longest one."""
    return frozenset(mark[0] for mark in marks), max(map(len, marks), default=1)


class TextStream:
    """Text of one completion: whole characters and no part of a stop string."""

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings) -> None:
        self._detokenizer, self._stops = detokenizer, stops

    def push(self, token: int, *, stops: bool = True) -> tuple[str, str | None]:
        text = self._detokenizer.push(token)
        if not self._stops.stops:
            return text, None
        return self._stops.push(text) if stops else (self._stops.skip(text), None)

    def finish(self) -> tuple[str, str | None]:
        """Return the text held back; incomplete characters are U+FFFD and may complete a stop string."""
        text, met = self._stops.push(self._detokenizer.flush())
        return text + self._stops.flush(), met
