"""LFM2: a list of Python calls between marks."""

from __future__ import annotations

from ..calls.literals import LiteralCalls
from ..calls.objects import JsonCalls
from . import Form

FORM = Form(
    shown_by=(r"<\|tool_call_start\|>",),
    opening=("<|tool_call_start|>",),
    closing=("<|tool_call_end|>",),
    syntaxes=(LiteralCalls(), JsonCalls()),
    list_start="<|tool_call_start|>[",
    separator=", ",
    list_end="]<|tool_call_end|>",
)
