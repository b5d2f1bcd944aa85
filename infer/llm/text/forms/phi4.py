"""Phi-4 mini: `<|tool_call|>` around a JSON list, or `functools` before one."""

from __future__ import annotations

from ..calls.objects import JsonCalls
from . import Form

FORM = Form(
    shown_by=(r"<\|tool\|>|<\|/tool_call\|>|functools\[", r"<\|/tool\|>|<\|/tool_call\|>|functools\["),
    opening=("<|tool_call|>", "functools["),
    closing=("<|/tool_call|>",),
    syntaxes=(JsonCalls(),),
    list_start="<|tool_call|>[",
    separator=", ",
    list_end="]<|/tool_call|>",
)
