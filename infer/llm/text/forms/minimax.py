"""MiniMax M2: `<invoke name="NAME"><parameter name="KEY">` value `</parameter></invoke>` in a block."""

from __future__ import annotations

from ..calls.tagged import TagCalls
from . import Form

BLOCK = ("<minimax:tool_call>", "</minimax:tool_call>")

FORM = Form(
    shown_by=("<minimax:tool_call>",),
    opening=BLOCK[:1],
    closing=BLOCK[1:],
    syntaxes=(
        TagCalls(BLOCK, '<invoke name="{name}">', '<parameter name="{key}">', "</parameter>", "</invoke>"),
    ),
    list_start="<minimax:tool_call>\n",
    after="\n",
    list_end="</minimax:tool_call>",
)
