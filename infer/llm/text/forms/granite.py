"""Granite 3: `<|tool_call|>` and a JSON list, or `<function_call>` and an object; Granite 4 writes as Hermes."""

from __future__ import annotations

from ..calls.objects import JsonCalls
from . import Form

FORM = Form(
    shown_by=(r"<\|tool_call\|>|<function_call>",),
    opening=("<|tool_call|>", "<tool_call>", "<function_call>"),
    closing=("</tool_call>",),
    syntaxes=(JsonCalls(),),
    markup=("<response>", "</response>"),
    list_start="<|tool_call|>[",
    separator=", ",
    list_end="]",
)
