"""Gemma 4: `call:NAME{key:<|"|>text<|"|>}` between marks."""

from __future__ import annotations

from ..calls.literals import LiteralCalls
from . import Form

FORM = Form(
    shown_by=(r"<\|tool_call>",),
    opening=("<|tool_call>",),
    closing=("<tool_call|>",),
    syntaxes=(LiteralCalls("call:", "{", ":", "}", '<|"|>'),),
    before="<|tool_call>",
    after="<tool_call|>",
)
