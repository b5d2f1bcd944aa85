"""Tools of a conversation: which calls may occur, the constraint that enforces one, and the parser that finds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import InputError
from ...llm.text import tools
from ...llm.text.chat_template import ChatTemplate


class Tools:
    """Tools in OpenAI's form; raises `InputError` naming what is wrong. `active`: calls may occur; `parallel`: many."""

    def __init__(
        self,
        offered: Sequence[Mapping[str, Any]],
        choice: str | Mapping[str, Any] | None,
        template: ChatTemplate | None,
        *,
        parallel: bool,
    ) -> None:
        self.tools = tools.check_tools(offered)
        self.choice = tools.check_choice(choice, self.tools)
        self.active = bool(self.tools) and self.choice != "none"
        sources = template.sources.values() if template is not None else ()
        self.style, self.parallel = tools.style_of("\n".join(sources)), parallel
        self.grammar = tools.constrain(self.tools, self.choice, self.style, parallel=parallel)

    def constraint(self, other: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the grammar that enforces a required call, else `other`, the response format's."""
        if self.grammar is not None and other is not None:
            raise InputError(
                "tool_choice requires a call, which excludes another response format", where="response_format"
            )
        return self.grammar or other

    def parser(self, prompt_end: bytes) -> tools.ToolParser | None:
        """Return a parser for one completion of a prompt with that end; None where all of it is content."""
        if not self.active:
            return None
        return tools.tool_parser(self.style, self.tools, thought=tools.open_thought(prompt_end))
