"""Seed-OSS: `<seed:tool_call>` around `<function=NAME><parameter=KEY>` value `</parameter></function>`."""

from __future__ import annotations

from ..calls.tagged import TagCalls
from . import Form

BLOCK = ("<seed:tool_call>", "</seed:tool_call>")

FORM = Form(
    shown_by=("<seed:tool_call>",),
    opening=BLOCK[:1],
    closing=BLOCK[1:],
    syntaxes=(TagCalls(BLOCK, "<function={name}>", "<parameter={key}>", "</parameter>", "</function>"),),
    list_start="<seed:tool_call>\n",
    after="\n",
    list_end="</seed:tool_call>",
)
