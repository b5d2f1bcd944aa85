"""Constraints in `Request.grammar`, and the checks before any library sees them.

{"json_schema": {…}}       a JSON value that is valid under the schema; keys in the schema's order
{"json_object": True}      any JSON object
{"regex": "…"}             the whole output matches; Rust's syntax, linear time: no look-around, no references
{"choice": ["…", …]}       one of the strings
{"grammar": "…"}           the whole output; the notation of Lark as llguidance has it, or llama.cpp's GBNF
{"calls": {…}}             tool calls, see `ToolCallGrammar`; `infer.llm.text.tools.constrain` makes it
{"answer": {…}}            one of these behind a thought, see `AnswerGrammar`; `forms.Choice.constrain` makes it
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from ....errors import InputError, unknown
from ..calls import CallGrammar

KINDS = ("json_schema", "json_object", "regex", "choice", "grammar", "calls", "answer")


class GrammarLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of untrusted grammars: size, depth, time and memory."""

    source_bytes: int = 64 << 10  # of the constraint as JSON
    depth: int = 64
    compile_seconds: float = 3.0
    compiling: int = 2  # at the same time, those that ran over their time included, and one long one
    long_seconds: float = 0.25  # of a trial, from which a grammar is a long one
    compiled_bytes: int = 128 << 20  # of memory, that one may take
    mask_seconds: float = 0.05  # of one token, in a trial
    cached: int = 32
    cached_bytes: int = 256 << 20  # of memory, that those take
    used_bytes: int = 512 << 20  # of memory, of those that completions use, cached or not
    lexer_states: int = 16_000  # 1 to 2 kB each
    row_items: int = 10_000  # alternatives the parser follows at once
    step_items: int = 50_000  # that it makes for one token, about 3 ms
    step_fuel: int = 200_000  # about 15 ms


class FreeText(msgspec.Struct, frozen=True, kw_only=True):
    """An output in which no call must come: `asides` CALLS, or `asides` `before` TEXT.

    `mark`: with which the first call begins; any text may come before it. `asides`: what is written before and after
    other messages. `never`: regular expressions of what would be a call in the text.
    """

    mark: str = ""
    before: str = ""
    asides: tuple[tuple[str, str], ...] = ()
    never: tuple[str, ...] = ()


class ToolCallGrammar(msgspec.Struct, frozen=True, kw_only=True):
    """Grammar of tool calls: `opening (before CALL after) (between before CALL after)* closing`.

    At most `most` calls, each one of `calls`; with `free` also none.
    """

    calls: list[CallGrammar]
    opening: str = ""
    before: str = ""
    after: str = ""
    between: str = ""
    closing: str = ""
    most: int = 1
    free: FreeText | None = None


class AnswerGrammar(msgspec.Struct, frozen=True, kw_only=True):
    """A constraint on what follows a thought: `start` TEXT `end` `between`, then `prefix` and the answer.

    `opened`: the prompt has begun the thought; else it may be absent. Without `end` there is none.
    """

    grammar: dict[str, Any]
    start: str = ""
    end: str = ""
    opened: bool = False
    between: str = ""
    prefix: str = ""


def named(kind: str, value: Any) -> str:
    """Return the kind by which messages name a constraint: that of the answer."""
    return next(iter(value["grammar"])) if kind == "answer" else kind


def read(constraint: Mapping[str, Any], limits: GrammarLimits) -> tuple[str, str]:
    """Return kind and JSON of a constraint; raises `InputError` for one that is malformed or too large."""
    if len(constraint) != 1:
        raise InputError(f"expected one of {', '.join(KINDS)}, got {len(constraint)} keys", where="grammar")
    ((kind, value),) = constraint.items()
    if kind not in KINDS:
        raise unknown("kind of grammar", str(kind), KINDS)
    _bound(value, limits, kind)
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"expected plain JSON: {error}", where=kind) from error
    if len(text) > limits.source_bytes:
        raise InputError(f"expected at most {limits.source_bytes} bytes, got {len(text)}", where=kind)
    _check_form(kind, value)
    return kind, text


def _check_form(kind: str, value: Any) -> None:
    if kind == "json_schema" and not isinstance(value, dict):
        raise InputError(f"expected a JSON schema as an object, got {type(value).__name__}", where=kind)
    if kind == "json_schema" and "x-guidance" in value:
        raise InputError(
            "a schema may not set options of the grammar library", where="json_schema.x-guidance"
        )
    if kind == "json_object" and value is not True:
        raise InputError(f"expected true, got {value!r:.50}", where=kind)
    if kind in ("regex", "grammar") and not isinstance(value, str):
        raise InputError(f"expected a string, got {type(value).__name__}", where=kind)
    if kind == "choice" and not (isinstance(value, list | tuple) and value):
        raise InputError("expected a list of at least one string", where=kind)
    if kind == "choice" and not all(isinstance(item, str) and item for item in value):
        raise InputError("expected strings that are not empty", where=kind)
    if kind in ("calls", "answer"):
        try:
            answer = msgspec.convert(value, ToolCallGrammar if kind == "calls" else AnswerGrammar)
        except msgspec.ValidationError as error:
            raise InputError(str(error), where=kind) from error
        if isinstance(answer, AnswerGrammar):
            ((inner, constrained),) = answer.grammar.items()
            _check_form(inner, constrained)


def _bound(value: Any, limits: GrammarLimits, kind: str) -> None:
    """Raise `InputError` for values nested too deep or too large, and for integers that no message can carry.

    The check ends as soon as a limit is passed.
    """
    level, values = [value], 0
    for _ in range(limits.depth):
        values += len(level)
        if values > limits.source_bytes:
            raise InputError(f"expected at most {limits.source_bytes} bytes, got {values} values", where=kind)
        if any(isinstance(item, int) and not -(1 << 63) <= item < 1 << 63 for item in level):
            raise InputError("expected integers of at most 64 bits", where=kind)
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list | tuple)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise InputError(f"expected at most {limits.depth} levels of nesting", where=kind)
