"""A reply to a conversation whose parts are given, for what no fake model writes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from infer.llm.text.tool_parser import ToolDelta
from infer.serve.llm.token_stream import UsageCounter


class ScriptedReply:
    """Reply that ends with the last of `parts`, one list of them for each output."""

    model = SimpleNamespace(text=None)
    request = SimpleNamespace(id="msg_1", sampling=SimpleNamespace(logprobs=None, max_tokens=4))

    def __init__(self, *parts: list[ToolDelta], finish: str = "stop") -> None:
        self.parts, self.finish = list(parts), finish
        self.usage = UsageCounter(SimpleNamespace(prompts=[]))  # type: ignore[arg-type]

    def read(self, output: Any) -> tuple[list[ToolDelta], str | None]:
        return self.parts.pop(0), None if self.parts else self.finish


def thought_then_called() -> ScriptedReply:
    """Return one of a thought, a message with blanks around it, and a call."""
    return ScriptedReply(
        [ToolDelta(reasoning="Let me")],
        [ToolDelta(reasoning=" think"), ToolDelta(content="\n\n")],
        [ToolDelta(content="Yes"), ToolDelta(content="."), ToolDelta(content="\n")],
        [ToolDelta(index=0, id="c", name="f"), ToolDelta(index=0, arguments="{}"), ToolDelta(content="\n")],
        finish="tool_calls",
    )
