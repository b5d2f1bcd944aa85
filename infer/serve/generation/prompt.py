"""Prompt of a conversation as token ids, and the tokens that may follow it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import InputError
from ..llm.llm_engine import LLMEngine

TOKEN_CHARACTERS = 256  # no token is longer, so a text beyond that times the context can't fit
RESERVED = {"chat_template", "self", "messages", "tools", "documents"}  # of the arguments of a template


class ContextLengthError(InputError):
    code = "context_length_exceeded"


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
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def check_size(model: LLMEngine, texts: Sequence[str], where: str) -> None:
    """Raise `ContextLengthError` for a text that no tokenizer makes short enough."""
    if any(len(text) > model.context * TOKEN_CHARACTERS for text in texts):
        raise ContextLengthError(f"the text is longer than {model.context} tokens", where=where)


def max_new_tokens(model: LLMEngine, prompt: Sequence[int], wanted: int | None, default: int | None) -> int:
    """Return the limit of generated tokens: `wanted`, or at most `default` (None: all that fit)."""
    left = model.context - (model.start_tokens or len(prompt))
    if left < (wanted or 0):
        asked = f" and {wanted} to come" if wanted else ""
        raise ContextLengthError(
            f"this model's context is {model.context} tokens, the prompt has {len(prompt)}{asked}",
            hint="Shorten the prompt or lower max_tokens",
            where="max_tokens" if wanted else "prompt",
        )
    if wanted is None and left == 0:
        raise ContextLengthError(f"the prompt fills the context of {model.context} tokens", where="prompt")
    return wanted if wanted is not None else left if default is None else min(default, left)
