"""Prompts of OpenAI requests as token ids: texts, lists of ids, conversations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ....errors import InputError
from ...http.request_context import RequestContext
from ...llm.llm_engine import LLMEngine
from .chat_types import Message, Tool
from .openai_errors import ContextLengthError

TOKEN_CHARACTERS = 256  # no token is longer, so a text beyond that times the context can't fit
RESERVED = {"chat_template", "self", "messages", "tools", "documents"}  # of the arguments of a template
MAX_PROMPTS = 1024


async def encode_prompts(
    context: RequestContext, generator: LLMEngine, given: str | list[Any], special: bool
) -> list[list[int]]:
    """Return the token ids of every prompt of a /v1/completions request, none of them empty."""
    rows: list[Any] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    if not rows or len(rows) > MAX_PROMPTS:
        raise InputError(f"expected 1 to {MAX_PROMPTS} prompts, got {len(rows)}", where="prompt")
    if isinstance(given, list) and isinstance(given[0], int):
        rows = [given]
    kind = str if isinstance(rows[0], str) else list
    if not all(isinstance(row, kind) for row in rows) or not all(
        isinstance(token, int) for row in rows if kind is list for token in row
    ):
        raise InputError("expected a text, texts, token ids, or lists of token ids", where="prompt")
    if kind is str:
        return await encode(context, generator, rows, special, "prompt")
    return [
        check_ids(generator, row, f"prompt[{i}]" if len(rows) > 1 else "prompt") for i, row in enumerate(rows)
    ]


async def chat_prompt(
    context: RequestContext,
    generator: LLMEngine,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    options: dict[str, Any],
) -> list[int]:
    """Render the conversation with the model's chat template and tokenize it.

    Raises `InputError`, also for a model without a template.
    """
    template = generator.template
    if template is None:
        hint = "Use /v1/completions, which needs none"
        raise InputError("this model has no chat template", where="messages", hint=hint)
    for name in RESERVED & options.keys():
        raise InputError(
            f"{name} cannot be set in chat_template_kwargs", where=f"chat_template_kwargs.{name}"
        )
    chat = [without_nulls(message) for message in messages]
    named = [without_nulls(tool) for tool in tools] if tools else None
    _check_size(generator, [str(message.get("content", "")) for message in chat], "messages")
    row = await generator.tokenizers.encode_chat(chat, named, options)
    if not row:
        raise InputError("the prompt is empty", where="messages")
    return row


def without_nulls(value: msgspec.Struct) -> dict[str, Any]:
    """Return the struct as a dict without null fields."""
    return {name: field for name, field in msgspec.to_builtins(value).items() if field is not None}


async def encode(
    context: RequestContext, generator: LLMEngine, texts: Sequence[str], special: bool, where: str
) -> list[list[int]]:
    _check_size(generator, texts, where)
    rows = await generator.tokenizers.encode(texts, special, where)
    for row in rows:
        if not row:
            raise InputError("the prompt is empty", where=where)
    return rows


def _check_size(generator: LLMEngine, texts: Sequence[str], where: str) -> None:
    if any(len(text) > generator.context * TOKEN_CHARACTERS for text in texts):
        raise ContextLengthError(f"the text is longer than {generator.context} tokens", where=where)


def check_ids(generator: LLMEngine, row: list[int], where: str) -> list[int]:
    size = generator.vocab_size
    if not row:
        raise InputError("the prompt is empty", where=where)
    if min(row) < 0 or max(row) >= size:
        raise InputError(f"expected token ids between 0 and {size - 1}", where=where)
    return row
