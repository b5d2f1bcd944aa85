"""Hermes and Qwen: `<tool_call>` around a JSON object; what Qwen3-Coder and GLM write in that tag is read too."""

from __future__ import annotations

from ..calls.objects import JsonCalls
from ..calls.tagged import TagCalls
from . import Form

BLOCK = ("<tool_call>", "</tool_call>")
TAGGED = TagCalls(
    BLOCK, "<function={name}>", "<parameter={key}>\n", "\n</parameter>", "</function>"
)  # Qwen3-Coder's

FORM = Form(
    shown_by=("<tool_call>",),
    opening=BLOCK[:1],
    closing=BLOCK[1:],
    syntaxes=(JsonCalls(), TAGGED),
    before="<tool_call>\n",
    separator="\n",
    after="\n</tool_call>",
)
