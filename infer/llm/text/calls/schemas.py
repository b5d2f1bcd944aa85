"""Schemas of a tool's arguments, one by one, for syntaxes that write each argument by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....errors import InputError

DATA = frozenset({"const", "enum", "default", "examples"})  # values, in which "$ref" means nothing
NAMED = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)  # schemas by name
_SAY_NOTHING = frozenset(
    {"title", "description", "examples", "default", "deprecated", "$schema", "$id", "$comment"}
)
_OF_AN_OBJECT = _SAY_NOTHING | {
    "type", "properties", "required", "additionalProperties", "$defs", "definitions",
}  # fmt: skip
HINT = 'Use tool_choice "auto", without strict'
_OF_A_TEXT = _SAY_NOTHING | {"type"}


def argument_schemas(tool: str, schema: dict[str, Any]) -> list[tuple[str, dict[str, Any], bool]]:
    """Return each argument's name, its schema with what it refers to, and whether it must be given.

    Raises `InputError` for a schema that says more than what each argument is.
    """
    if other := sorted(schema.keys() - _OF_AN_OBJECT):
        said = (
            f"{', '.join(other)} of the arguments of {tool} can't be enforced in this model's form of calls"
        )
        raise InputError(said, where="tools", hint=HINT)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    missing = [name for name in required if name not in properties]
    if missing:
        raise InputError(f"{tool} requires {missing[0]!r}, which has no schema", where="tools")
    root = moved(schema, "#/$defs/arguments")
    return [(name, _alone(name, own, root), name in required) for name, own in properties.items()]


def _alone(name: str, own: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of one argument as one of its own; references lead into the whole one, if there are any."""
    own = own if isinstance(own, dict) else {}
    if "$ref" not in repr(own):
        return own
    return {**root["properties"][name], "$defs": {"arguments": root}}


def moved(schema: Any, root: str) -> Any:
    """Rewrite references of a schema into itself (`#…`) for its new place."""
    if isinstance(schema, list):
        return [moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            made[key] = root + value[1:]
        elif key in NAMED and isinstance(value, dict):
            made[key] = {name: moved(inner, root) for name, inner in value.items()}
        else:
            made[key] = value if key in DATA else moved(value, root)
    return made


def says_boolean(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "boolean" and "enum" not in schema and "const" not in schema


def plain_text(tool: str, argument: str, schema: Mapping[str, Any]) -> list[str] | None:
    """Return the texts that a schema of texts allows, none of them where it allows any; None for another schema.

    Raises `InputError` for one that says more of a text.
    """
    allowed = [schema["const"]] if "const" in schema else schema.get("enum", [])
    if allowed:
        return list(allowed) if all(isinstance(one, str) for one in allowed) else None
    if schema.get("type") != "string":
        return None
    if other := sorted(schema.keys() - _OF_A_TEXT):
        said = f"{', '.join(other)} of {tool}.{argument} can't be enforced in this model's form of calls"
        raise InputError(said, where="tools", hint=HINT)
    return []
