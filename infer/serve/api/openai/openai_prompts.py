"""Prompts of OpenAI requests as token ids: texts, and lists of ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....errors import InputError
from ...generation.engine_request import check_size
from ...http.request_context import RequestContext
from ...llm.llm_engine import LLMEngine

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


async def encode(
    context: RequestContext, generator: LLMEngine, texts: Sequence[str], special: bool, where: str
) -> list[list[int]]:
    check_size(generator, texts, where)
    rows = await generator.tokenizers.encode(texts, special, where)
    for row in rows:
        if not row:
            raise InputError("the prompt is empty", where=where)
    return rows


def check_ids(generator: LLMEngine, row: list[int], where: str) -> list[int]:
    size = generator.vocab_size
    if not row:
        raise InputError("the prompt is empty", where=where)
    if min(row) < 0 or max(row) >= size:
        raise InputError(f"expected token ids between 0 and {size - 1}", where=where)
    return row
