"""Qwen3-Coder: `<tool_call>` around `<function=NAME><parameter=KEY>` value `</parameter></function>`."""

from __future__ import annotations

from msgspec.structs import replace

from .hermes import FORM as HERMES

FORM = replace(HERMES, shown_by=("<tool_call>", "<function="), syntaxes=HERMES.syntaxes[::-1])
