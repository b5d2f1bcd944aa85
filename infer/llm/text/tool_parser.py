"""Parser of tool calls in streamed text: no part of a marker or of a call is returned as content.

The forms are described in `infer.llm.text.tools`. Arguments are streamed, as soon as the name is known. What is found
does not depend on how the text is cut. A call that can't be read, or that the text ends in before its name is known, is
content, as are calls in thoughts and in fenced code.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from .json_scan import JsonScan, load, members, whole_object
from .xml_calls import FUNCTION, block_end, read_calls

ToolStyle = Literal["hermes", "llama", "mistral"]
_MARKERS = {"hermes": "<tool_call>", "llama": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}
_END, _XML = "</tool_call>", "<function="
_THOUGHTS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<reasoning>": "</reasoning>",
    "[THINK]": "[/THINK]",
}
THOUGHT_TOKENS = 16  # of the end of a prompt, enough for a mark
_ID = r'"(?:id|type)"\s*:\s*"(?:[^"\\]|\\.)*"\s*,\s*'
_HEADER = re.compile(
    rf'\s*\{{\s*(?:{_ID})*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*(?:{_ID})*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_KEYS = '(?!(?:name|type|id|arguments|parameters|function)")[^"]*"'
_OTHER = re.compile(
    rf'\s*\{{\s*(?:"name"\s*:\s*(?:[^"\s]|"(?:[^"\\]|\\.)*"\s*(?:\}}|,\s*"{_KEYS}))|"{_KEYS})'
)
_NAMED = re.compile(r"\s*([\w.-]{1,64})(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")
_NAMED_SO_FAR = re.compile(r"\s*[\w.-]{0,64}(?:\[[A-Z_]*\]?\w*){0,2}\s*")
_FENCE_SO_FAR = re.compile(r"^[ \t]*`+\Z", re.MULTILINE)


class ToolCall(msgspec.Struct, frozen=True):
    """Call of a tool."""

    id: str
    name: str
    arguments: str  # JSON, as the model wrote it


class ToolDelta(msgspec.Struct, frozen=True):
    """Content, reasoning, or a part of call number `index`: its first one carries `id` and `name`."""

    content: str = ""
    reasoning: str = ""
    index: int | None = None
    id: str | None = None
    name: str | None = None
    arguments: str = ""


def open_thought(prompt: bytes) -> str | None:
    """Return the mark of the thought that the end of a prompt begins, as templates of reasoning models do."""
    text = prompt.decode(errors="replace").rstrip()
    return next((mark for mark in _THOUGHTS if text.endswith(mark)), None)


class ToolParser:
    """State machine over streamed text. `schemas`: the JSON schema of each tool's arguments, by name.

    Where a form has no marker of its own, only calls of these tools are taken for calls. `thought`: the mark of
    the one in which the prompt ended. `complete` is False once a call's arguments ended too early or were no JSON.
    """

    def __init__(
        self, style: ToolStyle, schemas: Mapping[str, Mapping[str, Any]], *, thought: str | None = None
    ) -> None:
        self.style, self.schemas, self.calls, self.complete = style, schemas, 0, True
        self._marker = _MARKERS[style]
        marks = "|".join(map(re.escape, _THOUGHTS))
        self._marks = re.compile(
            rf"(?P<call>{re.escape(self._marker)})|(?P<end>{_END})|(?P<thought>{marks})|^[ \t]*(?P<fence>`{{3,}})",
            re.MULTILINE,
        )
        self._text = ""  # not yet decided upon
        self._read = 0  # characters of it that were taken for the beginning of calls
        self._out: list[ToolDelta] = []
        self._scan = JsonScan()
        self._last = False  # whether nothing comes after the text
        self._sure = False  # a marker was seen
        self._inside = False  # behind a call whose end tag has not come
        self._new_line = True  # only blanks since the last line end of the content
        self._state: Callable[[], bool] = self._start
        if thought is not None:
            self._begin_thought(thought)

    def push(self, text: str) -> list[ToolDelta]:
        self._text += text
        while self._state():
            pass
        out, self._out = self._out, []
        return out

    def finish(self) -> list[ToolDelta]:
        """Return the text held back so far; called once, at the end of the output."""
        self._last = True
        return self.push("")

    def read_all(self, text: str) -> tuple[str | None, list[ToolCall]]:
        """Split a whole output into content (None when nothing is left) and calls."""
        content, calls = "", list[ToolCall]()
        for delta in (*self.push(text), *self.finish()):
            content += delta.content
            if delta.index is not None and delta.index == len(calls):
                calls.append(ToolCall(delta.id or "", delta.name or "", delta.arguments))
            elif delta.index is not None:
                last = calls[delta.index]
                calls[delta.index] = ToolCall(last.id, last.name, last.arguments + delta.arguments)
        return (content if content and not (calls and content.isspace()) else None), calls

    def finish_reason(self, reason: str | None) -> str | None:
        """Return OpenAI's reason for the end: "tool_calls" in place of "stop", if there are calls to be made."""
        return "tool_calls" if reason == "stop" and self.calls and self.complete else reason

    # States return whether another one may go on with the text.

    def _start(self) -> bool:
        """Look for a call without a marker at the beginning of the text, and behind thoughts there."""
        rest = self._text.lstrip()
        marks = () if self.style == "hermes" else (self._marker, *_THOUGHTS)
        listed = self.style == "mistral" and rest.startswith("[")
        inner = rest[1:].lstrip() if listed else rest
        undecided = not inner or any(mark.startswith(rest) and mark != rest for mark in marks)
        if undecided and not self._last and self.style != "hermes":
            return False
        thought = next((mark for mark in marks[1:] if rest.startswith(mark)), None)
        if thought is not None:
            self._show(len(self._text) - len(rest) + len(thought))
            return self._begin_thought(thought)
        if inner.startswith("{") and (self.style == "llama" or listed):
            self._read = len(self._text) - len(inner)
            return self._begin_object()
        return self._enter(self._content)

    def _content(self) -> bool:
        for found in self._marks.finditer(self._text):
            if found["call"]:
                self._show(len(self._text[: found.start()].rstrip()))
                self._read = len(self._text) - len(self._text.lstrip()) + len(self._marker)
                self._sure = True
                return self._enter(self._after_marker if self.style == "mistral" else self._in_tag)
            if found["end"] and self._inside:
                self._show(len(self._text[: found.start()].rstrip()))
                self._text, self._inside = self._text.lstrip()[len(_END) :], False
                return True
            if found["thought"]:
                self._show(found.end())
                return self._begin_thought(found["thought"])
            if found["fence"] and (found.start() or self._new_line):
                if found.end() == len(self._text) and not self._last:
                    break
                self._fence = found["fence"]
                self._show(found.end())
                return self._enter(self._code)
        text = self._text if self._last else self._text[: len(self._text) - self._num_held_back()]
        text = text.rstrip() if self._last and self.calls else text
        self._show(len(text))
        self._text = "" if self._last else self._text
        return False

    def _num_held_back(self) -> int:
        """Return how many of the last characters may belong to a mark, or to the blanks before one."""
        text = self._text
        fence = _FENCE_SO_FAR.search(text)
        stop = fence.start() if fence and (fence.start() or self._new_line) else len(text)
        for mark in (self._marker, _END, *_THOUGHTS):
            for size in range(min(len(mark) - 1, len(text)), 0, -1):
                if mark.startswith(text[-size:]):
                    stop = min(stop, len(text) - size)
                    break
        return len(text) - len(text[:stop].rstrip())

    def _begin_thought(self, mark: str) -> bool:
        self._depth, self._mark = 1, mark
        self._resume = self._state
        return self._enter(self._thought)

    def _thought(self) -> bool:
        """Show everything until the thought ends, with those in it."""
        mark, end = self._mark, _THOUGHTS[self._mark]
        for found in re.finditer(f"{re.escape(mark)}|{re.escape(end)}", self._text):
            self._depth += 1 if found[0] == mark else -1
            if not self._depth:
                self._show(found.end())
                return self._enter(self._resume)
        return self._show_but(mark, end)

    def _code(self) -> bool:
        """Show fenced code until a fence of at least its length."""
        found = re.search(self._fence + "`*", self._text)
        if found and (found.end() < len(self._text) or self._last):
            self._show(found.end())
            return self._enter(self._content)
        self._show(len(self._text) if self._last else len(self._text.rstrip("`")))
        return False

    def _quoted_tag(self) -> bool:
        """Show what could not be read as a call until the end tag; what it holds is no call."""
        at = self._text.find(_END)
        if self.style == "hermes" and at >= 0:
            if self._inside:
                self._show(len(self._text[:at].rstrip()))
                self._text, self._inside = self._text.lstrip()[len(_END) :], False
            else:
                self._show(at + len(_END))
            return self._enter(self._content)
        return self._show_but(_END)

    def _show_but(self, *marks: str) -> bool:
        """Show the text without what may become one of the marks, and without those that came."""
        hold = 0
        for mark in () if self._last else marks:
            sizes = range(min(len(mark) - 1, len(self._text)), 0, -1)
            hold = max(hold, next((n for n in sizes if self._text.endswith(mark[:n])), 0))
        self._show(len(self._text) - hold)
        return False

    def _in_tag(self) -> bool:
        """Read after <tool_call>: an object, a list of them, or tags."""
        rest = self._text[self._read :].lstrip()
        if rest.startswith("["):
            rest = rest[1:].lstrip()
        if rest.startswith("{"):
            self._read = len(self._text) - len(rest)
            return self._begin_object()
        if rest.startswith(_XML):
            self._read = len(self._text) - len(rest)
            return self._enter(self._function_tags)
        return False if _XML.startswith(rest) and not self._last else self._not_a_call(self._read)

    def _after_marker(self) -> bool:
        """Read after [TOOL_CALLS]: a list, or a name."""
        rest = self._text[self._read :].lstrip()
        if rest.startswith("["):
            inner = rest[1:].lstrip()
            if inner.startswith("{"):
                self._read = len(self._text) - len(inner)
                return self._begin_object()
            return False if not inner and not self._last else self._not_a_call(self._read)
        if named := _NAMED.match(self._text, self._read):
            self._begin_call(named[1], named.end())
            self._outer = False
            return self._enter(self._arguments)
        more = _NAMED_SO_FAR.fullmatch(self._text, self._read) and not self._last
        return False if more else self._not_a_call(self._read)

    def _begin_object(self) -> bool:
        self._scan, self._scanned = JsonScan(), self._read
        return self._enter(self._object)

    def _object(self) -> bool:
        """Read a JSON object with name and arguments: until the arguments begin, where the name comes first."""
        if header := _HEADER.match(self._text, self._read):
            name = load(header[1])
            if not self._is_name(name):
                return self._not_a_call(self._read)
            self._begin_call(name, header.end())
            self._outer = True
            return self._enter(self._arguments)
        if not self._sure and _OTHER.match(self._text, self._read):
            return self._not_a_call(self._read)
        self._scanned = self._scan.feed(self._text, self._scanned)
        if not self._scan.done:
            broken = self._scan.broken
            return (broken or self._last) and self._not_a_call(self._scanned, broken=broken)
        call = self._call_of(self._scan.take())
        if call is None:
            return self._not_a_call(self._scanned)
        self._begin_call(call[0], self._scanned)
        self._out.append(ToolDelta(index=self.calls - 1, arguments=call[1]))
        return self._enter(self._between_calls)

    def _call_of(self, text: str) -> tuple[str, str] | None:
        """Return name and arguments of a call whose members come in any order, or in a member "function"."""
        found = members(text)
        if found is not None and found.get("function", "").startswith("{"):
            found = members(found["function"])
        name = load((found or {}).get("name", ""))
        if found is None or not self._is_name(name) or {"arguments", "parameters"} <= found.keys():
            return None
        absent = "{}" if self._sure else ""
        written = found.get("arguments", found.get("parameters", absent))
        if written.startswith('"'):
            written = load(written).strip() or "{}"
        arguments = whole_object("{}" if written == "null" else written)
        return None if arguments is None else (name, arguments)

    def _is_name(self, name: Any) -> bool:
        known = isinstance(name, str) and (self._sure or name in self.schemas)
        return known and bool(name) and not any("\ud800" <= one <= "\udfff" for one in name)

    def _function_tags(self) -> bool:
        if not FUNCTION.match(self._text, self._read):
            begun = re.fullmatch(r"<function=[^>\s]*\s*", self._text[self._read :])
            return False if begun and not self._last else self._not_a_call(self._read)
        stop = block_end(self._text, self._read, last=self._last)
        if stop is None:
            return False
        calls = read_calls(self._text[self._read : stop], self.schemas) if stop else None
        if calls is None:
            return self._not_a_call(stop or len(self._text))
        for name, arguments in calls:
            self._begin_call(name, 0)
            self._out.append(ToolDelta(index=self.calls - 1, arguments=arguments))
        self._text, self._inside = self._text[stop:], False
        return self._enter(self._content)

    def _arguments(self) -> bool:
        self._text = self._text[self._scan.feed(self._text) :]
        if piece := self._scan.take():
            self._out.append(ToolDelta(index=self.calls - 1, arguments=piece))
        if self._scan.broken or (self._last and not self._scan.done):
            self.complete = False
            return self._scan.broken and self._enter(self._quoted_tag)
        if not self._scan.done:
            return False
        self._scan, self._scanned = JsonScan(members=True), 0
        return self._enter(self._skip_rest if self._outer else self._between_calls)

    def _skip_rest(self) -> bool:
        """Skip the rest of the JSON object that contains the arguments."""
        self._scanned = self._scan.feed(self._text, self._scanned)
        if not (self._scan.done or self._scan.broken or self._last):
            return False
        self._text = "" if self._last and not self._scan.broken and not self._scan.done else self._text
        self._text = self._text[self._scanned if self._scan.done else 0 :]
        return self._enter(self._between_calls)

    def _between_calls(self) -> bool:
        """Look for another call, or content, after a call."""
        rest = self._text.lstrip(" \t\r\n;,")
        if not rest:
            self._text = "" if self._last else self._text
            return False
        if rest.startswith("{"):
            self._read = len(self._text) - len(rest)
            return self._begin_object()
        if self.style == "hermes":
            if not self._last and _END.startswith(rest) and rest != _END:
                return False
            if rest.startswith("]"):
                self._text = rest[1:]
                return True
            if rest.startswith(_END):
                self._text, self._inside = rest[len(_END) :], False
        else:
            self._text = rest.removeprefix("]") if self.style == "mistral" else rest
        return self._enter(self._content)

    def _begin_call(self, name: str, stop: int) -> None:
        """Start a call of `name`; the text continues at `stop`, with its arguments or behind them."""
        prefix = "" if self.style == "mistral" else "call_"
        number = secrets.token_hex(12)[
            : 9 if self.style == "mistral" else 24
        ]  # Mistral's templates want nine
        self._out.append(ToolDelta(index=self.calls, id=prefix + number, name=name))
        self.calls += 1
        self._inside = self.style == "hermes"
        self._text, self._read = self._text[stop:], 0
        self._scan = JsonScan()

    def _not_a_call(self, stop: int, *, broken: bool = False) -> bool:
        """Show the text until `stop`, a character at least, lest it be taken for a call again."""
        self._show(max(stop, 1))
        self._read = 0
        return self._enter(self._quoted_tag if broken and self._sure else self._content)

    def _show(self, count: int) -> None:
        text, self._text = self._text[:count], self._text[count:]
        if text:
            self._out.append(ToolDelta(content=text))
            line = text[text.rfind("\n") + 1 :]
            self._new_line = not line.strip(" \t") and ("\n" in text or self._new_line)

    def _enter(self, state: Callable[[], bool]) -> bool:
        self._state = state
        return True
