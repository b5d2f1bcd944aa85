"""Prompt of a conversation as token ids, and the variables of its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import InputError
from ..llm.llm_engine import LLMEngine
from .engine_request import check_size

RESERVED = {"chat_template", "self", "messages", "tools", "documents"}  # of the arguments of a template


async def chat_prompt(
    model: LLMEngine,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any],
) -> list[int]:
    """Render the conversation with the model's chat template and tokenize it.

    Raises `InputError`, also for a model without a template.
    """
    if model.template is None:
        hint = "Use /v1/completions, which needs none"
        raise InputError("this model has no chat template", where="messages", hint=hint)
    for name in RESERVED & options.keys():
        raise InputError(
            f"{name} cannot be set in chat_template_kwargs", where=f"chat_template_kwargs.{name}"
        )
    check_size(model, [str(message.get("content", "")) for message in messages], "messages")
    row = await model.tokenizers.encode_chat(messages, tools, options)
    if not row:
        raise InputError("the prompt is empty", where="messages")
    return row


def effort_options(model: LLMEngine, effort: str | None, where: str) -> dict[str, Any]:
    """Return the chat template's variables for an effort of reasoning; raises `InputError` where it knows none."""
    if effort is None:
        return {}
    sources = "".join(model.template.sources.values()) if model.template is not None else ""
    if effort != "none" and not any(name in sources for name in ("reasoning_effort", "enable_thinking")):
        raise InputError("this model's chat template knows no effort of reasoning", where=where)
    return {"reasoning_effort": effort, **thinking_options(effort != "none")}


def thinking_options(thinks: bool) -> dict[str, Any]:
    """Return the chat template's variables for thoughts or none; DeepSeek's call theirs `thinking`."""
    return {"enable_thinking": thinks, "thinking": thinks}
