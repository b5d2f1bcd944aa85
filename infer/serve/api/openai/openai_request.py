"""Translation of OpenAI request fields: prompts, sampling, grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....errors import InputError
from ....llm.engine.sampling.sampling_options import Sampling
from ...generation.engine_request import check_size
from ...generation.request_fields import options_of
from ...http import json_parse
from ...llm.llm_engine import LLMEngine
from .openai_types import CommonFields, ResponseFormat, StructuredOutputs

MAX_BIAS, MAX_PROMPTS = 1024, 1024


def texts_or_ids(given: str | list[Any], where: str) -> list[Any]:
    """Return texts, or rows of token ids, of a field that holds one of either or a list of them."""
    rows: list[Any] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    if all(isinstance(row, str) for row in rows):
        return rows
    if all(isinstance(row, list) and all(isinstance(token, int) for token in row) for row in rows):
        return rows
    raise InputError("expected a text, texts, token ids, or lists of token ids", where=where)


async def encode_prompts(generator: LLMEngine, given: str | list[Any], special: bool) -> list[list[int]]:
    """Return the token ids of every prompt of a /v1/completions request, none of them empty."""
    rows = texts_or_ids(given, "prompt")
    if not 1 <= len(rows) <= MAX_PROMPTS:
        raise InputError(f"expected 1 to {MAX_PROMPTS} prompts, got {len(rows)}", where="prompt")
    if isinstance(rows[0], str):
        return await _encode(generator, rows, special)
    return [
        check_ids(generator, row, f"prompt[{i}]" if len(rows) > 1 else "prompt") for i, row in enumerate(rows)
    ]


async def _encode(generator: LLMEngine, texts: Sequence[str], special: bool) -> list[list[int]]:
    check_size(generator, texts, "prompt")
    rows = await generator.tokenizers.encode(texts, special, "prompt")
    for row in rows:
        if not row:
            raise InputError("the prompt is empty", where="prompt")
    return rows


def check_ids(generator: LLMEngine, row: list[int], where: str) -> list[int]:
    size = generator.vocab_size
    if not row:
        raise InputError("the prompt is empty", where=where)
    if min(row) < 0 or max(row) >= size:
        raise InputError(f"expected token ids between 0 and {size - 1}", where=where)
    return row


def sampling_options(request: CommonFields) -> dict[str, Any]:
    """Return the options of `Sampling` by name that the fields give, None where one is absent."""
    given = {
        option: getattr(request, field)
        for field, option in options_of(CommonFields).items()
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
