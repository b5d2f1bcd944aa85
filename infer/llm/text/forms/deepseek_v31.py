"""DeepSeek V3.1: the name and JSON arguments, marks around each call and all of them."""

from __future__ import annotations

from msgspec.structs import replace

from ..calls.objects import NamedCalls
from .deepseek import FORM as DEEPSEEK
from .deepseek import NAMED

WRITTEN = "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>"

FORM = replace(
    DEEPSEEK,
    shown_by=("<｜tool▁calls▁begin｜>",),
    syntaxes=(NamedCalls(NAMED.header, WRITTEN, "<｜tool▁call▁end｜>", NAMED.mark),),
    separator="",
)
