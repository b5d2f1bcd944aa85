"""Translation of OpenAI request fields: prompts, sampling, grammar, timeout."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, TypeVar

import msgspec

from ....errors import GrammarError, InputError, NotUsableError, UsageError
from ....llm.engine.sampling.sampling_options import OPTIONS, Sampling, check_range
from ...http import json_parse
from ...http.request_context import RequestContext, tenant_of
from ...llm.llm_engine import LLMEngine
from .openai_errors import ContextLengthError, require_json
from .openai_types import (
    OPTION_NAMES,
    CommonFields,
    CompletionRequest,
    Message,
    StructuredOutputs,
    Tool,
)

T = TypeVar("T", bound=msgspec.Struct)
TOKEN_CHARACTERS = 256  # no token is longer, so a text beyond that times the context can't fit
RESERVED = {"chat_template", "self", "messages", "tools", "documents"}  # of the arguments of a template
MAX_PROMPTS, MAX_BIAS = 1024, 1024
DEFAULT_TOKENS = 16  # of /v1/completions, as OpenAI has it
_PLAIN = [
    *("min_tokens", "n", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
]


def read_request(context: RequestContext, to: type[T]) -> tuple[T, int]:
    """Return the decoded body and the number of its unknown fields."""
    require_json(context)
    value = context.value()
    request = json_parse.convert(value, to)
    for field, option in _options(to).items():
        if (given := getattr(request, field)) is not None:
            check_range(option, given, served=True, where=field)
    return request, len(value.keys() - _fields(to))


@cache
def _options(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return the name of the option for each field of the request that is one."""
    named = {field: OPTION_NAMES.get(field, field) for field in kind.__struct_fields__}
    return {field: name for field, name in named.items() if name in OPTIONS}


@cache
def _fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(kind.__struct_encode_fields__)


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


def translated(
    generator: LLMEngine, request: CompletionRequest, prompts: Sequence[list[int]]
) -> list[tuple[list[int], int | None]]:
    """Return each prompt in its `src_lang`, and the token of `tgt_lang` with which its completion begins, or None."""
    named = request.src_lang, request.tgt_lang
    if named == (None, None):
        return [(prompt, None) for prompt in prompts]
    return [generator.language_model.translated(prompt, *named) for prompt in prompts]


def max_new_tokens(
    generator: LLMEngine, prompt: Sequence[int], wanted: int | None, default: int | None
) -> int:
    """Return the limit of generated tokens: `wanted`, or at most `default` (None: all that fit)."""
    left = generator.context - (generator.start_tokens or len(prompt))
    if left < (wanted or 0):
        asked = f" and {wanted} to come" if wanted else ""
        raise ContextLengthError(
            f"this model's context is {generator.context} tokens, the prompt has {len(prompt)}{asked}",
            hint="Shorten the prompt or lower max_tokens",
            where="max_tokens" if wanted else "prompt",
        )
    if wanted is None and left == 0:
        raise ContextLengthError(
            f"the prompt fills the context of {generator.context} tokens", where="prompt"
        )
    return wanted if wanted is not None else left if default is None else min(default, left)


def sampling(
    request: CommonFields,
    generator: LLMEngine,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> Sampling:
    """Return the sampling parameters, defaults from the model's generation config.

    Raises `InputError` naming a field out of its range.
    """
    given = {
        option: getattr(request, field)
        for field, option in _options(CommonFields).items()
        if option in Sampling.__struct_fields__
    }
    given |= {
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "logit_bias": _bias(request.logit_bias or {}),
    }
    made: Sampling = generator.language_model.config.complete(given)
    made.check(generator.vocab_size, served=True)
    return made


def _bias(given: dict[str, float]) -> dict[int, float]:
    if len(given) > MAX_BIAS:
        raise InputError(f"expected at most {MAX_BIAS} tokens, got {len(given)}", where="logit_bias")
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise InputError("expected token ids as names", where="logit_bias")
    return {int(key): value for key, value in given.items()}


def timeout(context: RequestContext, request: CommonFields) -> float:
    """Return the timeout in seconds: the field, the header, or the server's limit for generation."""
    return request.timeout or context.timeout(context.service.limits.generation_seconds)


def grammar(request: CommonFields) -> dict[str, Any] | None:
    """Return `Request.grammar` from `response_format` or `structured_outputs`."""
    wanted, other = request.response_format, request.structured_outputs
    if other is not None:
        if wanted is not None and wanted.type != "text":
            raise InputError("two constraints on one output", where="structured_outputs")
        return _structured(other)
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"json_object": True}
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        raise InputError("expected a JSON schema", where="response_format.json_schema.schema")
    return {"json_schema": wanted.json_schema.schema}


def _structured(given: StructuredOutputs) -> dict[str, Any]:
    named = {"json_schema": given.json, "regex": given.regex, "choice": given.choice}
    found = {name: value for name, value in named.items() if value is not None}
    if len(found) != 1:
        raise InputError("expected one of json, regex, choice", where="structured_outputs")
    return found


async def compile_grammar(
    context: RequestContext, generator: LLMEngine, constraint: dict[str, Any] | None, where: str
) -> None:
    """Compile the grammar, first in a trial process, so that the engine finds it in its cache.

    Raises `GrammarError` where it can't be compiled.
    """
    if constraint is None:
        return
    check = partial(generator.language_model.check_grammar, constraint)
    try:
        if generator.grammar_trials is not None:
            tried = await generator.grammar_trials.check(tenant_of(context), constraint)
            check = partial(check, (tried.size, tried.seconds))
        await asyncio.get_running_loop().run_in_executor(context.service.grammars, check)
    except NotUsableError as error:
        raise InputError(error.message, where=where, hint=error.hint) from error
    except UsageError as error:
        raise GrammarError(error.message, where=where, hint=error.hint) from error
