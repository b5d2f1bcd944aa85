"""DeepSeek V3 and R1: the name, JSON arguments in fenced code, marks around each call and all of them."""

from __future__ import annotations

from ..calls.objects import NamedCalls
from . import Form

NAMED = NamedCalls(
    r"<｜tool▁call▁begin｜>(?:\s*function\s*<｜tool▁sep｜>)?\s*(?P<name>[\w.-]{1,64})\s*"
    r"(?:<｜tool▁sep｜>\s*)?(?:```json\s*)?",
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
    "\n```<｜tool▁call▁end｜>",
    "<｜tool▁call▁begin｜>",
)

FORM = Form(
    shown_by=("<｜tool▁calls▁begin｜>", "```json"),
    opening=("<｜tool▁calls▁begin｜>",),
    closing=("<｜tool▁calls▁end｜>",),
    syntaxes=(NAMED,),
    between=("```", "<｜tool▁call▁end｜>"),
    list_start="<｜tool▁calls▁begin｜>",
    separator="\n",
    list_end="<｜tool▁calls▁end｜>",
)
