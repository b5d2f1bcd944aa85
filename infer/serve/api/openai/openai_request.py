"""Translation of OpenAI request fields: prompts, sampling, grammar, timeout."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

import msgspec

from ....errors import InputError
from ....llm.engine.sampling.sampling_options import OPTIONS, Sampling, check_range
from ...generation.engine_request import complete_sampling
from ...http import json_parse
from ...http.request_context import RequestContext
from ...llm.llm_engine import LLMEngine
from .openai_errors import require_json
from .openai_types import (
    OPTION_NAMES,
    CommonFields,
    CompletionRequest,
    ResponseFormat,
    StructuredOutputs,
)
from .refused_fields import refuse_fields, refuse_unknown

T = TypeVar("T", bound=msgspec.Struct)
MAX_BIAS = 1024
CONSTRAINTS = {"response_format": ResponseFormat, "structured_outputs": StructuredOutputs}
DEFAULT_TOKENS = 16  # of /v1/completions, as OpenAI has it


def read_request(context: RequestContext, to: type[T], *, strict: bool = False) -> tuple[T, int]:
    """Return the decoded body and the number of its unknown fields.

    Raises `InputError` naming a field that is wrong, or shapes the output and is not offered; if `strict`, any that is
    not offered and asks for something.
    """
    require_json(context)
    value = context.value()
    request = json_parse.convert(value, to)
    for field, option in _options(to).items():
        if (given := getattr(request, field)) is not None:
            check_range(option, given, served=True, where=field)
    refuse_fields(value, _fields(to))
    if strict:
        refuse_unknown(value, _fields(to), "")
    for name, kind in CONSTRAINTS.items():
        refuse_unknown(value.get(name), _fields(kind), name)
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
    counts = {"max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    return complete_sampling(generator, sampling_options(request) | counts)


def sampling_options(request: CommonFields) -> dict[str, Any]:
    """Return the options of `Sampling` by name that the fields give, None where one is absent."""
    given = {
        option: getattr(request, field)
        for field, option in _options(CommonFields).items()
        if option in Sampling.__struct_fields__
    }
    return given | {"logit_bias": _bias(request.logit_bias or {})}


def _bias(given: dict[str, float]) -> dict[int, float]:
    if len(given) > MAX_BIAS:
        raise InputError(f"expected at most {MAX_BIAS} tokens, got {len(given)}", where="logit_bias")
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise InputError("expected token ids as names", where="logit_bias")
    return {int(key): value for key, value in given.items()}


def timeout(context: RequestContext, request: CommonFields) -> float:
    """Return the seconds left of the field, the header, or the server's limit for generation."""
    context.seconds = request.timeout
    return context.timeout(context.service.limits.generation_seconds)


def grammar(request: CommonFields) -> tuple[dict[str, Any] | None, str]:
    """Return `Request.grammar` and the field that gave it; raises `InputError` where two fields do."""
    found = [
        (constraint, where)
        for where, constraint in (
            ("response_format", _formatted(request.response_format)),
            ("structured_outputs", _structured(request.structured_outputs)),
            ("guided_json", _schema(request.guided_json, "guided_json")),
            ("guided_regex", _named("regex", request.guided_regex or None)),
            ("guided_choice", _named("choice", request.guided_choice or None)),
            ("guided_grammar", _named("grammar", request.guided_grammar or None)),
        )
        if constraint is not None
    ]
    if len(found) > 1:
        fields = [where for _, where in found]
        raise InputError(
            f"expected one constraint on the output, got {' and '.join(fields)}", where=fields[-1]
        )
    return found[0] if found else (None, "response_format")


def _formatted(wanted: ResponseFormat | None) -> dict[str, Any] | None:
    if wanted is None:
        return None
    schemas = [wanted.schema] if wanted.schema is not None else []
    if wanted.json_schema is not None and wanted.json_schema.schema is not None:
        schemas.append(wanted.json_schema.schema)
    if wanted.type == "text" and not schemas:
        return None
    if wanted.type == "json_object" and not schemas:
        return {"json_object": True}
    if wanted.type == "text" or len(schemas) != 1:
        got = f"{len(schemas) or 'none'} with type {wanted.type}"
        raise InputError(f"expected one JSON schema, got {got}", where="response_format.json_schema.schema")
    return {"json_schema": schemas[0]}


def _structured(given: StructuredOutputs | None) -> dict[str, Any] | None:
    if given is None:
        return None
    found = [
        constraint
        for constraint in (
            _schema(given.json, "structured_outputs.json"),
            _named("json_object", given.json_object or None),
            _named("regex", given.regex),
            _named("choice", given.choice),
            _named("grammar", given.grammar),
        )
        if constraint is not None
    ]
    if len(found) != 1:
        raise InputError(
            "expected one of json, json_object, regex, choice, grammar", where="structured_outputs"
        )
    return found[0]


def _schema(given: dict[str, Any] | str | None, where: str) -> dict[str, Any] | None:
    if given == "":
        return None
    if isinstance(given, str):
        try:
            given = json_parse.decode(given.encode(), dict[str, Any])
        except InputError as error:
            raise InputError(f"expected a JSON schema: {error.message}", where=where) from error
    return _named("json_schema", given)


def _named(kind: str, value: object) -> dict[str, Any] | None:
    return None if value is None else {kind: value}
