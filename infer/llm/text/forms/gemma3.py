"""Gemma 3: Python calls in code that is fenced as `tool_code`, one a line."""

from __future__ import annotations

from ..calls.literals import LiteralCalls
from . import Form

FORM = Form(
    shown_by=("```tool_code",),
    opening=("```tool_code",),
    syntaxes=(LiteralCalls(),),
    between=("```",),
    list_start="```tool_code\n",
    after="\n",
    list_end="```",
)
