"""FunctionGemma: `call:NAME{key:<escape>text<escape>}` between marks."""

from __future__ import annotations

from ..calls.literals import LiteralCalls
from . import Form

FORM = Form(
    shown_by=("<start_function_call>|<start_function_declaration>",),
    opening=("<start_function_call>",),
    closing=("<end_function_call>",),
    syntaxes=(LiteralCalls("call:", "{", ":", "}", "<escape>"),),
    before="<start_function_call>",
    after="<end_function_call>",
)
