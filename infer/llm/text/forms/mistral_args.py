"""Mistral since 2025: `[TOOL_CALLS]NAME[ARGS]` and JSON arguments."""

from __future__ import annotations

from msgspec.structs import replace

from .mistral import FORM as MISTRAL

FORM = replace(
    MISTRAL,
    shown_by=(r"\[TOOL_CALLS\]", r"\[ARGS\]"),
    syntaxes=MISTRAL.syntaxes[::-1],
    list_start="",
    before="[TOOL_CALLS]",
    separator="",
    list_end="",
)
