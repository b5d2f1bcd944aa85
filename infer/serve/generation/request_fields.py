"""Fields of a request for text, in every dialect: their options, their ranges, and what is refused of others."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from ...errors import InputError
from ...llm.engine.sampling.sampling_options import OPTIONS, bounds, check_range
from ..http import json_parse
from ..http.json_parse import require_json
from ..http.request_context import RequestContext
from .refused_fields import IDLE, REFUSED

T = TypeVar("T", bound=msgspec.Struct)
Stop = Annotated[str, Meta(max_length=1024)]
# Options of `infer.llm.engine.sampling.sampling_options` that have another name here.
OPTION_NAMES = {
    "include_stop_str_in_output": "include_stop",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "stop_sequences": "stop",
    "top_logprobs": "logprobs",
}


def option(field: str) -> Meta:
    """Describe a field of the OpenAPI document by its option, whose range `read_request` checks."""
    found = bounds(OPTION_NAMES.get(field, field), served=True)
    limits = {"minimum": found.minimum, "exclusiveMinimum": found.above, "maximum": found.maximum}
    schema = {name: limit for name, limit in limits.items() if limit is not None}
    return Meta(description=found.help, extra_json_schema=schema or None)


class JsonSchema(msgspec.Struct, kw_only=True):
    name: str = ""
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """Form of the output. `schema`: that of a JSON object where llama.cpp has it, beside the type."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """A constraint on the output: exactly one of a JSON schema (or its text), any JSON object, a regular expression,
    choices, or a grammar in the notation of Lark or GBNF.
    """

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


CONSTRAINTS = {"response_format": ResponseFormat, "structured_outputs": StructuredOutputs}


def read_request(context: RequestContext, to: type[T], *, strict: bool = False) -> tuple[T, int]:
    """Return the decoded body and the number of its unknown fields.

    Raises `InputError` naming a field that is wrong, or shapes the output and is not offered; if `strict`, any that is
    not offered and asks for something.
    """
    require_json(context.headers)
    value = context.value()
    request = json_parse.convert(value, to)
    for field, option in options_of(to).items():
        if (given := getattr(request, field)) is not None:
            check_range(option, given, served=True, where=field)
    refuse_fields(value, _fields(to))
    if strict:
        refuse_unknown(value, _fields(to), "")
    for name, kind in CONSTRAINTS.items():
        refuse_unknown(value.get(name), _fields(kind), name)
    return request, len(value.keys() - _fields(to))


@cache
def options_of(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return the name of the option for each field of the request that is one."""
    named = {field: OPTION_NAMES.get(field, field) for field in kind.__struct_fields__}
    return {field: name for field, name in named.items() if name in OPTIONS}


@cache
def _fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(kind.__struct_encode_fields__)


def refuse_fields(given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise `InputError` naming the first field that is not `known`, shapes the output, and asks for something."""
    for name in sorted(given.keys() - known):
        hint, idle = REFUSED.get(name, ("", ()))
        if hint and given[name] not in idle:
            raise InputError(f"{name} is not offered", where=name, hint=hint)


def refuse_unknown(given: object, known: Collection[str], where: str) -> None:
    """Raise `InputError` for a field of a constraint that is not `known`, whatever its name, and asks for something."""
    if not isinstance(given, dict):
        return
    for name in sorted(given.keys() - known):
        if given[name] not in IDLE:
            place = f"{where}.{name[:64]}" if where else name[:64]
            raise InputError(f"{place} is not offered: expected {', '.join(sorted(known))}", where=place)


def read_object(value: object, to: type[T], where: str) -> T:
    """Convert an object of a request, at `where`, to a struct. Raises `InputError`, also for fields that it lacks."""
    tag = to.__struct_config__.tag_field
    refuse_unknown(value, {*to.__struct_encode_fields__, *([tag] if tag else ())}, where)
    return json_parse.convert(value, to, where=where)
