"""Translation of a /v1/responses request into a conversation: items into messages, tools and formats into chat's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ....errors import InputError
from ...generation.conversation import Conversation, effort_options
from ...generation.request_fields import read_object
from ...generation.tools import function_tool
from ...http.routing import new_id
from ...llm.llm_engine import LLMEngine
from .responses_types import (
    CallItem,
    CallOutputItem,
    FunctionTool,
    InputMessage,
    InputPart,
    Item,
    ItemReference,
    ReasoningItem,
    ResponsesRequest,
    TextFormat,
)

AnyItem = InputMessage | CallItem | CallOutputItem | ReasoningItem
KINDS: dict[str, type[AnyItem]] = {
    "message": InputMessage,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
}
PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
LOGPROBS = "message.output_text.logprobs"


def read_items(given: str | Sequence[Item], kept: Callable[[str], Item | None]) -> list[Item]:
    """Return the items of `input`, checked, with an id and a status, as they are kept and listed.

    `kept`: looks up the item of an id, for a reference to it.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_read_item(item, f"input[{i}]", kept) for i, item in enumerate(given)]


def _read_item(given: Item, where: str, kept: Callable[[str], Item | None]) -> Item:
    kind = given.get("type") or ("message" if "role" in given else "item_reference")
    if kind == "item_reference":
        reference = read_object({**given, "type": kind}, ItemReference, where)
        if (found := kept(reference.id)) is None:
            raise InputError("no item of this id is kept", where=f"{where}.id", hint="Send the item itself")
        return found
    if not isinstance(kind, str) or kind not in KINDS:
        known = ", ".join((*KINDS, "item_reference"))
        raise InputError(
            f"items of type {kind!r:.64} are not offered: expected {known}", where=f"{where}.type"
        )
    item = read_object({**given, "type": kind}, KINDS[kind], where)
    item.id, item.status = item.id or new_id(f"{PREFIXES[kind]}_", 16), item.status or "completed"
    if isinstance(item, InputMessage):
        item.content = _read_parts(item.content, f"{where}.content", said=item.role == "assistant")
    elif isinstance(item, CallOutputItem) and not isinstance(item.output, str):
        item.output = _read_parts(item.output, f"{where}.output", said=False)
    plain: Item = msgspec.to_builtins(item)
    return plain


def _read_parts(given: str | Sequence[Item], where: str, *, said: bool) -> list[Item]:
    """Return the parts of a content; `said`: by the assistant."""
    if isinstance(given, str):
        given = [{"type": "output_text" if said else "input_text", "text": given}]
    parts: list[Item] = []
    for i, each in enumerate(given):
        part = read_object(each, InputPart, f"{where}[{i}]")
        if part.type == "input_image":
            if part.image_url is None:
                raise InputError("expected image_url with a data URL", where=f"{where}[{i}]")
            parts.append({"type": part.type, "image_url": part.image_url, "detail": part.detail or "auto"})
            continue
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            raise InputError("expected text, got nothing", where=f"{where}[{i}]")
        parts.append({"type": part.type, "refusal" if part.type == "refusal" else "text": text})
        if part.type == "output_text":
            parts[-1]["annotations"] = part.annotations or []
    return parts


def conversation(
    request: ResponsesRequest, model: LLMEngine, items: Sequence[Item], earlier: int, id: str
) -> Conversation:
    """Return the conversation of these items, of which so many come from an `earlier` response."""
    logprobs = None
    if request.top_logprobs is not None or LOGPROBS in (request.include or ()):
        logprobs = request.top_logprobs or 0
    for i, name in enumerate(request.include or ()):
        if name != LOGPROBS:
            raise InputError(f"{name[:64]} is not offered: expected {LOGPROBS}", where=f"include[{i}]")
    messages = Messages(request.instructions)
    for i, item in enumerate(items):
        messages.add(item, f"input[{i - earlier}]" if i >= earlier else "previous_response_id")
    effort = request.reasoning.effort if request.reasoning is not None else None
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or ())]
    return Conversation(
        id=id,
        messages=messages.all,
        options={"temperature": request.temperature, "top_p": request.top_p, "logprobs": logprobs},
        tools=tools,
        tool_choice=_tool_choice(request.tool_choice),
        parallel_calls=request.parallel_tool_calls is not False,
        template_options=effort_options(model, effort, "reasoning.effort"),
        grammar=_grammar(request),
        grammar_field="text.format",
        max_tokens=request.max_output_tokens,
        priority=request.priority or 0,
        stream=bool(request.stream),
        places={
            **messages.places,
            **{f"tools[{i}].function": f"tools[{i}]" for i in range(len(tools))},
            "messages": "input",
            "prompt": "input",
            "max_tokens": "max_output_tokens",
            "response_format": "text.format",
        },
    )


class Messages:
    """Messages of chat made from items; what one assistant's turn said, thought and called is one message."""

    def __init__(self, instructions: str | None) -> None:
        self.all: list[Item] = []
        self.places: dict[str, str] = {}
        self._calls: dict[str, str] = {}  # name of the tool of each call
        if instructions is not None:
            self._append({"role": "system", "content": instructions}, "instructions")

    def add(self, item: Item, where: str) -> None:
        kind = item["type"]
        if kind == "function_call_output":
            if (name := self._calls.get(item["call_id"])) is None:
                raise InputError("no function_call before it has this call_id", where=f"{where}.call_id")
            content = _content(item["output"])
            self._append(
                {"role": "tool", "tool_call_id": item["call_id"], "name": name, "content": content}, where
            )
        elif kind == "function_call":
            message = self._assistant(where)
            calls = message.setdefault("tool_calls", [])
            self.places[f"messages[{len(self.all) - 1}].tool_calls[{len(calls)}].function"] = where
            function = {"name": item["name"], "arguments": item["arguments"]}
            calls.append({"id": item["call_id"], "type": "function", "function": function})
            self._calls[item["call_id"]] = item["name"]
        elif kind == "reasoning":
            texts = item.get("content") or item.get("summary", ())
            reasoning = "\n".join(part["text"] for part in texts)
            self._assistant(where, "content", "tool_calls", "reasoning_content")["reasoning_content"] = (
                reasoning
            )
        elif item["role"] == "assistant":
            self._assistant(where, "content", "tool_calls")["content"] = _content(item["content"])
        else:
            self._append({"role": item["role"], "content": _content(item["content"])}, where)

    def _assistant(self, where: str, *absent: str) -> Item:
        """Return the assistant's message that stands last and has none of these fields yet, or a new one."""
        last = self.all[-1] if self.all else None
        if last is None or last["role"] != "assistant" or any(name in last for name in absent):
            self._append({"role": "assistant"}, where)
        return self.all[-1]

    def _append(self, message: Item, where: str) -> None:
        self.places[f"messages[{len(self.all)}]"] = where
        self.all.append(message)


def _content(parts: str | Sequence[Item]) -> str | list[Item]:
    """Return the parts as those of chat's messages."""
    if isinstance(parts, str):
        return parts
    return [
        {"type": "image_url", "image_url": {"url": part["image_url"]}}
        if part["type"] == "input_image"
        else {"type": "text", "text": part["refusal"] if part["type"] == "refusal" else part["text"]}
        for part in parts
    ]


def _tool(given: Item, where: str) -> Item:
    if given.get("type") != "function":
        kind = given.get("type")
        raise InputError(
            f"tools of type {kind!r:.64} are not offered: expected function",
            where=f"{where}.type",
            hint="Hosted tools run at OpenAI; offer a function that does the same",
        )
    tool = read_object(given, FunctionTool, where)
    return function_tool(tool.name, tool.description, tool.parameters, strict=tool.strict)


def _tool_choice(given: str | Item | None) -> str | Item | None:
    if not isinstance(given, dict):
        return given
    if given.get("type") != "function":
        raise InputError(
            f"tool_choice of type {given.get('type')!r:.64} is not offered: expected function",
            where="tool_choice.type",
        )
    return {"type": "function", "function": {"name": given.get("name")}}


def _grammar(request: ResponsesRequest) -> dict[str, Any] | None:
    if request.text is None:
        return None
    if request.text.verbosity not in (None, "medium"):
        raise InputError(
            "verbosity is not offered", where="text.verbosity", hint="Ask for it in instructions"
        )
    if request.text.format is None:
        return None
    form = read_object(request.text.format, TextFormat, "text.format")
    if (form.type == "json_schema") != (form.schema is not None):
        raise InputError(
            f"expected a schema with type json_schema and no other, got type {form.type}",
            where="text.format.schema",
        )
    if form.type == "text":
        return None
    return {"json_object": True} if form.schema is None else {"json_schema": form.schema}
