"""Tool calls (OpenAI's `tools` and `tool_choice`): constraint on the output, and parsing of calls in it.

    style_of(template) -> ToolStyle                       which form of call a chat template teaches
    check_tools(tools) -> list[Tool]                     raises InputError naming what is wrong, at tools[i]…
    check_choice(choice, tools) -> Choice                "none" | "auto" | "required" | a tool's name
    constrain(tools, choice, style) -> dict | None       for `Request.grammar`; None: the model is free ("none", "auto")
    parse(text, style, tools) -> (content | None, [ToolCall])
    tool_parser(style, tools) -> ToolParser, its .push(text) -> [ToolDelta] and, at the end, .finish() -> [ToolDelta]
    open_thought(prompt) -> the mark of a thought that the prompt ends in, for the two before: calls in it are not made

Constrained calls name a tool of the request and carry arguments that are valid under its JSON schema, as far as
`max_tokens` reaches. Give `Sampling.skip_special_tokens=False` with tools, for some markers are special tokens; the
readers also take outputs in which they were skipped. The forms:

    hermes   <tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call> one after the other, text before (Hermes, Qwen);
             within the tags also <function=name><parameter=key>value</parameter></function> (Qwen3-Coder)
    llama    {"name": …, "parameters": {…}} as the whole output, <|python_tag|> before it or not (Llama 3)
    mistral  [TOOL_CALLS][{"name": …, "arguments": {…}}, …] or [TOOL_CALLS]name{…} (Mistral)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from ...errors import InputError
from .tool_parser import THOUGHT_TOKENS, ToolCall, ToolDelta, ToolParser, ToolStyle, open_thought

__all__ = [
    "THOUGHT_TOKENS", "Choice", "Tool", "ToolCall", "ToolDelta", "ToolParser", "ToolStyle",
    "check_choice", "check_tools", "constrain", "open_thought", "parse", "style_of", "tool_parser",
]  # fmt: skip
Choice = Literal["none", "auto", "required"] | str
MAX_TOOLS, MAX_CALLS = 128, 16
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_DATA = frozenset(
    {"const", "enum", "default", "examples"}
)  # of a schema: values, in which "$ref" means nothing
_NAMED = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)  # schemas by name


class Tool(msgspec.Struct, frozen=True):
    """Tool that a model may call."""

    name: str
    parameters: dict[str, Any]  # JSON schema of an object


def style_of(template: str | None) -> ToolStyle:
    """Return the form of tool calls by the markers of a chat template; hermes, the most usual one, without any."""
    text = template or ""
    if "[TOOL_CALLS]" in text:
        return "mistral"
    if "<tool_call>" in text:
        return "hermes"
    if "<|python_tag|>" in text or re.search(r'"name": function name, "parameters"', text):
        return "llama"
    return "hermes"


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
        found[name] = Tool(name, _object(function.get("parameters"), f"{where}.function.parameters"))
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
    tools: Sequence[Tool], choice: Choice, style: ToolStyle = "hermes", *, parallel: bool = True
) -> dict[str, Any] | None:
    """Return a `Request.grammar` that allows nothing but calls: of any tool, or of the one that is named.

    `parallel` allows several of them; Llama's form has only one.
    """
    if choice in ("none", "auto"):
        return None
    chosen = [tool for tool in tools if choice in ("required", tool.name)]
    most = MAX_CALLS if parallel and choice == "required" and style != "llama" else 1
    key = "parameters" if style == "llama" else "arguments"
    calls: dict[str, Any] = {"schema": _schema(chosen, key), "most": most}
    if style == "hermes":
        calls |= {"before": "<tool_call>\n", "after": "\n</tool_call>", "between": "\n"}
    elif style == "mistral":
        calls |= {"opening": "[TOOL_CALLS][", "between": ", ", "closing": "]"}
    return {"calls": calls}


def parse(
    text: str, style: ToolStyle = "hermes", tools: Sequence[Tool] = (), *, thought: str | None = None
) -> tuple[str | None, list[ToolCall]]:
    """Split a whole output into content (None when nothing is left) and calls.

    What looks like a call and can't be parsed stays in the content, so that nothing is lost.
    """
    return tool_parser(style, tools, thought=thought).read_all(text)


def tool_parser(
    style: ToolStyle = "hermes", tools: Sequence[Tool] = (), *, thought: str | None = None
) -> ToolParser:
    """Make a parser of one output, whole or streamed; `thought`: what its prompt ends in, see `open_thought`."""
    return ToolParser(style, {tool.name: tool.parameters for tool in tools}, thought=thought)


def _object(schema: Any, where: str) -> dict[str, Any]:
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(schema, dict):
        raise InputError(f"expected a JSON schema as an object, got {type(schema).__name__}", where=where)
    if schema.get("type", "object") != "object":
        raise InputError(f"arguments are an object, got type {schema['type']!r:.40}", where=where)
    return {"type": "object", **schema}


def _schema(tools: Sequence[Tool], key: str) -> dict[str, Any]:
    """Make the JSON schema of a call of one of the tools, whose own schemas move to `$defs`."""
    kinds: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    for i, tool in enumerate(tools):
        definitions[f"tool{i}"] = _moved(tool.parameters, f"#/$defs/tool{i}")
        properties = {"name": {"const": tool.name}, key: {"$ref": f"#/$defs/tool{i}"}}
        kinds.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", key],
                "additionalProperties": False,
            }
        )
    return {"anyOf": kinds, "$defs": definitions}


def _moved(schema: Any, root: str) -> Any:
    """Rewrite references of a schema into itself (`#…`) for its new place."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = root + value[1:]
        elif key in _NAMED and isinstance(value, dict):
            moved[key] = {name: _moved(inner, root) for name, inner in value.items()}
        else:
            moved[key] = value if key in _DATA else _moved(value, root)
    return moved
