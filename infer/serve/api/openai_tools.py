"""Tool calls of a chat: their definition in the request, and their parsing from the output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ...errors import InputError
from ...llm.text import tools
from .openai_types import (
    ChatRequest,
    Delta,
    FunctionCall,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from .server_sent_events import encode


class Tools:
    """Tools of one request; raises `InputError` naming what is wrong. `active`: calls may occur."""

    def __init__(self, request: ChatRequest, template: Any) -> None:
        given = [msgspec.to_builtins(tool) for tool in request.tools or ()]
        choice = msgspec.to_builtins(request.tool_choice)
        self.tools = tools.check_tools(given)
        self.choice = tools.check_choice(choice, self.tools)
        self.active = bool(self.tools) and self.choice != "none"
        sources = template.sources.values() if template is not None else ()
        self.style = tools.style_of("\n".join(sources))
        parallel = request.parallel_tool_calls is not False
        self.grammar = tools.constrain(self.tools, self.choice, self.style, parallel=parallel)

    def constraint(self, other: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the grammar that enforces a required call, else `other`, the response format's."""
        if self.grammar is not None and other is not None:
            raise InputError(
                "tool_choice requires a call, which excludes another response format", where="response_format"
            )
        return self.grammar or other

    def reader(self) -> tools.ToolParser | None:
        """Return a parser for one streamed completion, None without active tools."""
        return tools.tool_parser(self.style, self.tools) if self.active else None

    def read(self, text: str) -> tuple[str | None, list[ToolCall]]:
        """Return content and tool calls of a full completion."""
        if not self.active:
            return text, []
        content, calls = tools.parse(text, self.style, self.tools)
        made = [ToolCall(id=call.id, function=FunctionCall(call.name, call.arguments)) for call in calls]
        return (content if calls else text), made


def deltas(found: Sequence[tools.ToolDelta]) -> list[bytes]:
    """Return the JSON of field `delta` for each parsed part."""
    return [b'"delta":%b' % encode(_delta(one)) for one in found]


def _delta(one: tools.ToolDelta) -> Delta:
    if one.index is None:
        return Delta(content=one.content)
    if one.name is None:
        return Delta(
            tool_calls=[ToolCallDelta(index=one.index, function=FunctionDelta(arguments=one.arguments))]
        )
    function = FunctionDelta(name=one.name, arguments=one.arguments)
    return Delta(
        tool_calls=[ToolCallDelta(index=one.index, id=one.id or "", type="function", function=function)]
    )
