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
    StructuredOutputs,
)

T = TypeVar("T", bound=msgspec.Struct)
MAX_BIAS = 1024
DEFAULT_TOKENS = 16  # of /v1/completions, as OpenAI has it


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
            raise InputError(
                "expected response_format or structured_outputs, got both", where="structured_outputs"
            )
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
    trials, client, pool = generator.grammar_trials, tenant_of(context), context.service.grammars
    try:
        if trials is None:
            await asyncio.get_running_loop().run_in_executor(pool, check)
        else:
            tried = await trials.check(client, constraint)
            await trials.compile(client, tried, pool, partial(check, (tried.size, tried.seconds)))
    except NotUsableError as error:
        raise InputError(error.message, where=where, hint=error.hint) from error
    except UsageError as error:
        raise GrammarError(error.message, where=where, hint=error.hint) from error
