"""Tools of a request (OpenAI's `tools` and `tool_choice`): their checks, and the constraint on the output.

    check_tools(tools) -> list[Tool]                     raises InputError naming what is wrong, at tools[i]…
    check_choice(choice, tools) -> Choice                "none" | "auto" | "required" | a tool's name
    constrain(tools, choice, form) -> dict | None        for `Request.grammar`; None: the model is free
    ToolParser(form, tools)                              .push(text) -> [ToolDelta] and, at the end, .finish()

Constrained calls name a tool of the request and carry arguments that are valid under its JSON schema, as far as
`max_tokens` reaches. Give `Sampling.skip_special_tokens=False` with tools, for some marks are special tokens; the
parser also takes outputs in which they were skipped. How calls are written is data, see `infer.llm.text.forms`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from ...errors import InputError
from .forms import Form
from .grammar.grammar_request import FreeText, ToolCallGrammar

Choice = Literal["none", "auto", "required"] | str
MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Tool(msgspec.Struct, frozen=True):
    """Tool that a model may call."""

    name: str
    parameters: dict[str, Any]  # JSON schema of an object
    strict: bool = False  # its arguments are valid also where no call is required


def check_tools(tools: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """Check OpenAI's `tools`; raises `InputError` naming what is wrong."""
    if len(tools) > MAX_TOOLS:
        raise InputError(f"expected at most {MAX_TOOLS} tools, got {len(tools)}", where="tools")
    found: dict[str, Tool] = {}
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
            raise InputError('expected {"type": "function", "function": {…}}', where=where)
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InputError(
                "expected a name of 1 to 64 letters, digits, _, - or .", where=f"{where}.function.name"
            )
        if name in found:
            raise InputError(f"a second tool is named {name!r}", where=f"{where}.function.name")
        parameters = _object(function.get("parameters"), f"{where}.function.parameters")
        found[name] = Tool(name, parameters, function.get("strict") is True)
    return list(found.values())


def check_choice(choice: Any, tools: Sequence[Tool]) -> Choice:
    """Check OpenAI's `tool_choice`; None is "auto" where there are tools, else "none"."""
    names = [tool.name for tool in tools]
    if choice is None:
        return "auto" if names else "none"
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if choice.get("type", "function") != "function" or not isinstance(name, str):
            raise InputError('expected {"type": "function", "function": {"name": …}}', where="tool_choice")
        if name not in names:
            known = ", ".join(names) or "none"
            raise InputError(f"no tool is named {name!r:.80}", where="tool_choice", hint=f"Known: {known}")
        return name
    if choice not in ("none", "auto", "required"):
        raise InputError('expected "none", "auto", "required" or a function', where="tool_choice")
    if choice == "required" and not names:
        raise InputError("a call is required, but there are no tools", where="tool_choice")
    return str(choice)


def constrain(
    tools: Sequence[Tool], choice: Choice, form: Form, *, parallel: bool = True
) -> dict[str, Any] | None:
    """Return a `Request.grammar` that allows nothing but calls: of any tool, or of the one that is named.

    `parallel` allows several of them, in forms that have several. Under "auto" the model is free, but in its
    calls where a tool is `strict`.
    """
    if choice == "none" or (choice == "auto" and not any(tool.strict for tool in tools)):
        return None
    chosen = [tool for tool in tools if choice in ("auto", "required", tool.name)]
    syntax = form.syntaxes[0]
    calls = ToolCallGrammar(
        calls=[syntax.grammar(tool.name, tool.parameters) for tool in chosen],
        opening=form.list_start,
        before=form.before,
        after=form.after,
        between=form.separator,
        closing=form.list_end,
        most=form.most if parallel and choice in ("auto", "required") else 1,
        free=_free_text(form, chosen) if choice == "auto" else None,
    )
    return {"calls": msgspec.to_builtins(calls)}


def _free_text(form: Form, tools: Sequence[Tool]) -> FreeText:
    """Return what an output may hold beside calls: text without marks of calls and what the parser takes for one."""
    mark = next((mark for mark in form.opening if (form.list_start or form.before).startswith(mark)), "")
    if mark or form.answer:
        return FreeText(mark=mark, before=form.answer, asides=form.asides)
    names = "|".join(re.escape(tool.name) for tool in tools)
    unmarked = [call.replace("NAMES", names) for call in form.unmarked]
    return FreeText(never=(*map(re.escape, form.opening), *unmarked))


def _object(schema: Any, where: str) -> dict[str, Any]:
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(schema, dict):
        raise InputError(f"expected a JSON schema as an object, got {type(schema).__name__}", where=where)
    if schema.get("type", "object") != "object":
        raise InputError(f"arguments are an object, got type {schema['type']!r:.40}", where=where)
    return {"type": "object", **schema}
