"""Kimi K2: `functions.NAME:INDEX`, the id of a call, and JSON arguments, marks around each call and all of them."""

from __future__ import annotations

from ..calls.objects import NamedCalls
from . import Form

FORM = Form(
    shown_by=(r"<\|tool_calls_section_begin\|>",),
    opening=("<|tool_calls_section_begin|>",),
    closing=("<|tool_calls_section_end|>",),
    syntaxes=(
        NamedCalls(
            r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]{1,64}?):\d+)\s*"
            r"<\|tool_call_argument_begin\|>\s*",
            "<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<|tool_call_begin|>",
        ),
    ),
    between=("<|tool_call_end|>",),
    list_start="<|tool_calls_section_begin|>",
    list_end="<|tool_calls_section_end|>",
)
