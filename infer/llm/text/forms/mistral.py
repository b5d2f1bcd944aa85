"""Mistral until 2024: `[TOOL_CALLS]` and a JSON list; its later form is read too."""

from __future__ import annotations

from ..calls.objects import JsonCalls, NamedCalls
from . import Form

NAMED = NamedCalls(r"\s*(?P<name>[\w.-]{1,64})(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*", "{name}[ARGS]")

FORM = Form(
    shown_by=(r"\[TOOL_CALLS\]",),
    opening=("[TOOL_CALLS]",),
    syntaxes=(JsonCalls(), NAMED),
    bare="[",
    list_start="[TOOL_CALLS][",
    separator=", ",
    list_end="]",
    ids=("", 9),  # its templates want nine digits
)
