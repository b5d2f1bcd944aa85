"""Llama 3: a JSON object with `parameters` as the whole output, `<|python_tag|>` before it or not."""

from __future__ import annotations

from ..calls import literals, objects
from ..calls.literals import LiteralCalls
from ..calls.objects import JsonCalls
from . import Form

FORM = Form(
    shown_by=(r'<\|python_tag\|>|"name": function name, "parameters"',),
    opening=("<|python_tag|>",),
    syntaxes=(JsonCalls("parameters"), LiteralCalls()),
    bare="{[",
    unmarked=(objects.UNMARKED, literals.UNMARKED),
    most=1,
)
