"""Parts of one completion in their order, for dialects whose replies are lists of items: each begins and ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from ...llm.text.tool_parser import ToolDelta

Kind = Literal["reasoning", "content", "call"]
Step = Literal["begin", "text", "end"]


class Part:
    """Reasoning, content, or the call `call_id` of tool `name`, whose text are its arguments."""

    def __init__(self, kind: Kind, index: int, call_id: str = "", name: str = "") -> None:
        self.kind, self.index, self.call_id, self.name = kind, index, call_id, name
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def add(self, text: str) -> None:
        self._pieces.append(text)


class PartSequence:
    """Parts so far. Blanks between two parts are content of neither; alone they are the reply's content."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._open: Part | None = None
        self._blanks = ""

    def push(self, deltas: Iterable[ToolDelta]) -> Iterator[tuple[Step, Part, str]]:
        """Yield what happens: a part begins, text is added to it, it ends."""
        for delta in deltas:
            if delta.index is not None:
                if delta.name is not None:
                    yield from self._begin("call", delta.id or "", delta.name)
                yield from self._grow(delta.arguments)
            elif delta.reasoning:
                if self._kind != "reasoning":
                    yield from self._begin("reasoning")
                yield from self._grow(delta.reasoning)
            elif self._kind == "content":
                yield from self._grow(delta.content)
            else:
                text = self._blanks = self._blanks + delta.content
                if text and not text.isspace():
                    yield from self._begin("content")
                    yield from self._grow(text)

    def finish(self) -> Iterator[tuple[Step, Part, str]]:
        """Yield the end of the last part."""
        if not self.parts and self._blanks:
            blanks = self._blanks
            yield from self._begin("content")
            yield from self._grow(blanks)
        yield from self._end()

    @property
    def _kind(self) -> Kind | None:
        return None if self._open is None else self._open.kind

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> Iterator[tuple[Step, Part, str]]:
        yield from self._end()
        self._blanks = ""
        self._open = Part(kind, len(self.parts), call_id, name)
        self.parts.append(self._open)
        yield "begin", self._open, ""

    def _grow(self, text: str) -> Iterator[tuple[Step, Part, str]]:
        if text and self._open is not None:
            self._open.add(text)
            yield "text", self._open, text

    def _end(self) -> Iterator[tuple[Step, Part, str]]:
        if self._open is not None:
            ended, self._open = self._open, None
            yield "end", ended, ""
