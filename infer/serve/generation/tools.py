"""Tools of a conversation: which calls may occur, and the constraint that enforces one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import InputError
from ...llm.text import tools
from ...llm.text.forms import Choice


def function_tool(
    name: str, description: str | None, parameters: dict[str, Any] | None, *, strict: bool | None
) -> dict[str, Any]:
    """Return a tool in OpenAI's form, without what is None."""
    fields = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {
        "type": "function",
        "function": {key: value for key, value in fields.items() if value is not None},
    }


class Tools:
    """Tools in OpenAI's form; raises `InputError` naming what is wrong. `active`: calls may occur; `parallel`: many."""

    def __init__(
        self,
        offered: Sequence[Mapping[str, Any]],
        choice: str | Mapping[str, Any] | None,
        forms: Choice,
        *,
        parallel: bool,
    ) -> None:
        self.tools = tools.check_tools(offered)
        self.choice = tools.check_choice(choice, self.tools)
        self.active = bool(self.tools) and self.choice != "none"
        self.forms, self.parallel = forms, parallel
        self.grammar = tools.constrain(self.tools, self.choice, forms.form, parallel=parallel)

    def constraint(self, other: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return `other`, the grammar of the response format, else that of calls."""
        if self.grammar is not None and other is not None and self.choice != "auto":
            raise InputError(
                "tool_choice requires a call, which excludes another response format", where="response_format"
            )
        return other or self.grammar
