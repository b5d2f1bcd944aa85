"""GLM 4.5 and later: `<tool_call>NAME`, then `<arg_key>KEY</arg_key><arg_value>` value `</arg_value>`."""

from __future__ import annotations

from msgspec.structs import replace

from ..calls.objects import JsonCalls
from ..calls.tagged import TagCalls
from .hermes import BLOCK
from .hermes import FORM as HERMES

TAGGED = TagCalls(BLOCK, "{name}", "<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>")

FORM = replace(
    HERMES,
    shown_by=("<tool_call>", "<arg_key>"),
    syntaxes=(TAGGED, JsonCalls()),
    before="<tool_call>",
    after="",
)
