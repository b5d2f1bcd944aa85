"""Patterns of PEFT's configurations: matched as PEFT matches them, refused where a match may take very long."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

from ...errors import SourceError

REPEATS = 6  # in one pattern: the time of a match grows with their number as its exponent
CHARACTERS = 2000


def check_pattern(pattern: str, path: Path) -> None:
    """Raise for invalid regular expressions and for those that may take exponential time to match."""
    try:
        repeats = _repeats(_parser.parse(pattern)) if len(pattern) <= CHARACTERS else REPEATS + 1
    except (re.error, RecursionError, OverflowError) as error:
        raise SourceError(f"{pattern!r:.60} is no regular expression: {error}", where=str(path)) from error
    if repeats > REPEATS:
        raise SourceError(f"the pattern {pattern!r:.60} may take too long to match", where=str(path))


def _repeats(parsed: Any) -> int:
    """Count the repeats in a parsed expression; nested repeats and back-references count as too many."""
    count = 0
    for operation, argument in parsed:
        if operation in (_constants.GROUPREF, _constants.GROUPREF_EXISTS):
            return REPEATS + 1
        if operation is _constants.BRANCH:
            count += sum(map(_repeats, argument[1]))
        elif operation in (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT):
            _, most, body = argument
            inner = _repeats(body)
            if most > 1 and (inner or _has_choice(body)):
                return REPEATS + 1
            count += inner + 1
        elif (body := _body(operation, argument)) is not None:
            count += _repeats(body)
    return count


def _has_choice(parsed: Any) -> bool:
    bodies = (_body(operation, argument) for operation, argument in parsed)
    return any(operation is _constants.BRANCH for operation, _ in parsed) or any(
        _has_choice(body) for body in bodies if body is not None
    )


def _body(operation: Any, argument: Any) -> Any:
    """Return the expression within a group or a look-around."""
    if operation in (_constants.SUBPATTERN, _constants.ASSERT, _constants.ASSERT_NOT):
        return argument[-1]
    return argument if operation is _constants.ATOMIC_GROUP else None


def first_match(patterns: Mapping[str, Any], name: str, default: float) -> float:
    """Return the value of the first pattern that matches the end of a layer's name, from one of its dots on."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default


def is_named(names: Sequence[str] | str | None, name: str) -> bool:
    """Tell if names match a layer: a string is a regular expression of the whole name, a list has names or ends."""
    if not names:
        return False
    if isinstance(names, str):
        return re.fullmatch(names, name) is not None
    return any(name == each or name.endswith(f".{each}") for each in names)
