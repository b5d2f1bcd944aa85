"""`uniqueItems` of JSON schemas as far as a grammar can say it: arrays of few values are written out, in each order.

The grammar library has no `uniqueItems`. An array that is not rewritten here keeps it, and is refused by name.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

MOST_VALUES = 4  # of which arrays are written out: 65 of them
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_ARRAY = frozenset(("type", "items", "uniqueItems", "minItems", "maxItems"))
_NOTES = frozenset(("title", "description", "default", "examples", "$comment", "deprecated"))


def without_unique_items(schema: Any, root: Mapping[str, Any] | None = None) -> Any:
    """Return a schema that takes the same values, without `uniqueItems` where that can be said otherwise.

    That is where it is false, where there is at most one item, and where items are one of at most `MOST_VALUES` texts
    or integers. `root`: the whole schema, in which references are looked up.
    """
    if not isinstance(schema, dict):
        return schema
    root = schema if root is None else root
    plain = dict(schema)
    for name in _MAPS:
        if isinstance(inner := plain.get(name), dict):
            plain[name] = {key: without_unique_items(value, root) for key, value in inner.items()}
    for name in _LISTS:
        if isinstance(inner := plain.get(name), list):
            plain[name] = [without_unique_items(value, root) for value in inner]
    for name in _SCHEMAS:
        if name in plain:
            plain[name] = without_unique_items(plain[name], root)
    return plain if "uniqueItems" not in plain else _rewritten(plain, root)


def _rewritten(array: dict[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in array.items() if name != "uniqueItems"}
    if array["uniqueItems"] is False or array.get("maxItems") in (0, 1):
        return rest
    values = _values(array.get("items"), root)
    least, most = array.get("minItems", 0), array.get("maxItems", MOST_VALUES)
    if not values or not array.keys() <= _ARRAY | _NOTES or array.get("type") != "array":
        return array
    if array["uniqueItems"] is not True or type(least) is not int or type(most) is not int:
        return array
    rows = [
        {
            "type": "array",
            "prefixItems": [{"const": value} for value in row],
            "items": False,
            "minItems": size,
            "maxItems": size,
        }
        for size in range(max(least, 0), min(most, len(values)) + 1)
        for row in itertools.permutations(values, size)
    ]
    notes = {name: value for name, value in array.items() if name in _NOTES}
    return {**notes, "anyOf": rows} if rows else array


def _values(items: Any, root: Mapping[str, Any]) -> list[Any]:
    """Return the values that items may have, if they are few, distinct, and all texts or all integers; else none."""
    reference = items.get("$ref") if isinstance(items, dict) else None
    if isinstance(reference, str) and reference.count("/") == 2 and reference.startswith("#/"):
        _, group, name = reference.split("/")
        named = root.get(group)
        items = named.get(name) if isinstance(named, dict) and len(items) == 1 else None
    if not isinstance(items, dict) or not items.keys() <= {"enum", "const", "type"} | _NOTES:
        return []
    values = items.get("enum", [items["const"]] if "const" in items else [])
    if not isinstance(values, list) or len(values) > MOST_VALUES:
        return []
    kinds = {type(value) for value in values}
    named_type = {str: "string", int: "integer"}.get(next(iter(kinds))) if len(kinds) == 1 else None
    if named_type is None or items.get("type", named_type) != named_type:
        return []
    return values if len(set(values)) == len(values) else []
