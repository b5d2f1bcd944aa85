"""Llama 3.2 and 4: a list of Python calls, `[name(key="value"), …]`, `<|python_start|>` before it or not."""

from __future__ import annotations

from ..calls import literals, objects
from ..calls.literals import LiteralCalls
from ..calls.objects import JsonCalls
from . import Form

FORM = Form(
    shown_by=(r"<\|python_start\|>|\[func_name1\(",),
    opening=("<|python_start|>", "<|python_tag|>"),
    closing=("<|python_end|>",),
    syntaxes=(LiteralCalls(), JsonCalls("parameters")),
    bare="[{",
    unmarked=(literals.UNMARKED, objects.UNMARKED),
    list_start="[",
    separator=", ",
    list_end="]",
)
