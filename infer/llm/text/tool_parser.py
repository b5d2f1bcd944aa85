"""Parser of tool calls in streamed text: no part of a marker or of a call is returned as content.

The forms are described in `infer.llm.text.tools`. Arguments are streamed, as soon as the name is known.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from .json_scan import Scan, load, num_held_back

ToolStyle = Literal["hermes", "llama", "mistral"]
_MARKERS = {"hermes": "<tool_call>", "llama": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}
_END = "</tool_call>"
_HEADER = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_KEYS = '(?!(?:name|type|id|arguments|parameters|function)")[^"]*"'
_OTHER = re.compile(
    rf'\s*\{{\s*(?:"name"\s*:\s*(?:[^"\s]|"(?:[^"\\]|\\.)*"\s*(?:\}}|,\s*"{_KEYS}))|"{_KEYS})'
)
_NAMED = re.compile(r"\s*([\w.-]{1,64})(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)\s*>(.*?)(?:</function>|$)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)\s*>\n?(.*?)\n?</parameter>", re.DOTALL)


class ToolCall(msgspec.Struct, frozen=True):
    """Call of a tool."""

    id: str
    name: str
    arguments: str  # JSON, as the model wrote it


class ToolDelta(msgspec.Struct, frozen=True):
    """Content, or a part of call number `index`: its first one carries `id` and `name`."""

    content: str = ""
    index: int | None = None
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class ToolParser:
    """State machine over streamed text. `schemas`: the JSON schema of each tool's arguments, by name.

    Where a form has no marker of its own, only calls of these tools are taken for calls.
    """

    def __init__(self, style: ToolStyle, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self.style, self.schemas, self.calls = style, schemas, 0
        self._marker = _MARKERS[style]
        self._text = ""  # not yet decided upon
        self._given_up = ""  # what was taken for the beginning of calls, should it have to be content
        self._out: list[ToolDelta] = []
        self._scan = Scan()
        self._last = False  # whether nothing comes after the text
        self._sure = False  # a marker was seen
        self._state: Callable[[], bool] = self._content if style == "hermes" else self._start

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

    # States return whether another one may go on with the text.

    def _start(self) -> bool:
        """Look for a call without a marker at the beginning of the text."""
        rest = self._text.lstrip()
        inner = rest[1:].lstrip() if self.style == "mistral" and rest.startswith("[") else rest
        undecided = not inner or (self._marker.startswith(rest) and rest != self._marker)
        if undecided and not self._last:
            return False
        bare = inner.startswith("{") and (self.style == "llama" or inner is not rest)
        if bare:
            self._consume(len(self._text) - len(inner))
        return self._enter(self._call if bare else self._content)

    def _content(self) -> bool:
        at = self._text.find(self._marker)
        if at >= 0:
            self._emit_content(self._text[:at].rstrip())
            self._text = self._text[at:]
            self._consume(len(self._marker))
            self._sure = True
            return self._enter(self._after_marker if self.style == "mistral" else self._call)
        hold = 0 if self._last else num_held_back(self._text, self._marker)
        text = self._text[: len(self._text) - hold]
        self._emit_content(text.rstrip() if self._last and self.calls else text)
        self._text = self._text[len(text) :]
        return False

    def _after_marker(self) -> bool:
        """Read after [TOOL_CALLS]: a list, or a name."""
        rest = self._text.lstrip()
        if rest.startswith("["):
            self._consume(len(self._text) - len(rest) + 1)
            return self._enter(self._call)
        named = _NAMED.match(self._text)
        if named:
            self._begin_call(named[1], named.end(), depth=0)
            return self._enter(self._arguments)
        return self._not_a_call() if self._last else False

    def _call(self) -> bool:
        """Read a JSON object with name and arguments, until the arguments begin."""
        header = _HEADER.match(self._text)
        if header:
            name = load(header[1])
            if self._sure or name in self.schemas:
                self._begin_call(str(name), header.end(), depth=1)
                return self._enter(self._arguments)
            return self._not_a_call()
        body, complete = self._body()
        if complete or self._last:
            return self._unusual_call(body)
        if not self._sure and (_OTHER.match(self._text) or not self._text.lstrip().startswith("{")):
            return self._not_a_call()
        return False

    def _body(self) -> tuple[str, bool]:
        """Return the text of the current call, and True once it is complete."""
        if self.style == "hermes":
            at = self._text.find(_END)
            return (self._text[:at], True) if at >= 0 else (self._text, False)
        start = len(self._text) - len(self._text.lstrip())
        stop = Scan().end(self._text, start) if self._text[start:].startswith("{") else -1
        return (self._text[:stop], True) if stop >= 0 else (self._text, False)

    def _unusual_call(self, body: str) -> bool:
        """Parse a tool call in a form other than a JSON object with name and arguments."""
        value = load(body)
        if isinstance(value, dict) and isinstance(value.get("function"), dict):
            value = value["function"]
        if self.style == "hermes" and (function := _FUNCTION.fullmatch(body.strip())):
            value = {"name": function[1], "arguments": self._parameters(function[1], function[2])}
        if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
            return self._not_a_call()
        arguments = value.get("arguments", value.get("parameters", {} if self._sure else None))
        if isinstance(arguments, str):
            arguments = load(arguments)
        if not isinstance(arguments, dict) or not (self._sure or name in self.schemas):
            return self._not_a_call()
        self._begin_call(name, len(body), depth=0)
        self._out.append(ToolDelta(index=self.calls - 1, arguments=json.dumps(arguments, ensure_ascii=False)))
        return self._enter(self._between_calls)

    def _parameters(self, name: str, text: str) -> dict[str, Any]:
        """Read <parameter=…>: text where the tool's schema says so, else JSON if it parses."""
        known = self.schemas.get(name, {}).get("properties", {})
        found: dict[str, Any] = {}
        for key, value in _PARAMETER.findall(text):
            kind = known.get(key, {}).get("type") if isinstance(known.get(key, {}), Mapping) else None
            loaded = value if kind == "string" else load(value)
            found[key] = value if loaded is None and value.strip() != "null" else loaded
        return found

    def _arguments(self) -> bool:
        stop = self._scan.end(self._text, 0)
        piece = self._text if stop < 0 else self._text[:stop]
        if piece:
            self._out.append(ToolDelta(index=self.calls - 1, arguments=piece))
        self._text = self._text[len(piece) :]
        if stop < 0:
            return False
        self._scan = Scan(depth=self._outer)
        return self._enter(self._skip_rest if self._outer else self._between_calls)

    def _skip_rest(self) -> bool:
        """Skip the rest of the JSON object that contains the arguments."""
        stop = self._scan.end(self._text, 0)
        self._text = "" if stop < 0 else self._text[stop:]
        return stop >= 0 and self._enter(self._between_calls)

    def _between_calls(self) -> bool:
        """Look for another call, or content, after a call."""
        self._given_up = ""
        if self.style == "hermes":
            found = [at for at in (self._text.find(_END), self._text.find(self._marker)) if at >= 0]
            if not found:
                self._text = "" if self._last else self._text[-len(_END) :]
                return False
            self._text = self._text[min(found) :].removeprefix(_END)
            return self._enter(self._content)
        rest = self._text.lstrip(" \t\r\n;,")
        if not rest:
            self._text = "" if self._last else self._text
            return False
        if rest.startswith("{"):
            self._consume(len(self._text) - len(rest))
            return self._enter(self._call)
        self._text = rest.removeprefix("]") if self.style == "mistral" else rest
        return self._enter(self._content)

    def _begin_call(self, name: str, stop: int, depth: int) -> None:
        """Start a call of `name`; the text continues at `stop`, with its arguments or behind them."""
        prefix = "" if self.style == "mistral" else "call_"
        number = secrets.token_hex(12)[
            : 9 if self.style == "mistral" else 24
        ]  # Mistral's templates want nine
        self._out.append(ToolDelta(index=self.calls, id=prefix + number, name=name))
        self.calls += 1
        self._text, self._given_up = self._text[stop:], ""
        self._scan, self._outer = Scan(), depth

    def _not_a_call(self) -> bool:
        self._emit_content(self._given_up)
        self._given_up = ""
        if self._text:  # a character at least, lest it be taken for a call again
            self._emit_content(self._text[0])
            self._text = self._text[1:]
        return self._enter(self._content)

    def _consume(self, count: int) -> None:
        self._given_up += self._text[:count]
        self._text = self._text[count:]

    def _emit_content(self, text: str) -> None:
        if text:
            self._out.append(ToolDelta(content=text))

    def _enter(self, state: Callable[[], bool]) -> bool:
        self._state = state
        return True
