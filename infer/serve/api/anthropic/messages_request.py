"""Translation of a /v1/messages request into a conversation: blocks into messages, tools and formats into chat's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....errors import InputError
from ...generation.conversation import Conversation, effort_options, thinking_options
from ...generation.request_fields import read_object
from ...generation.tools import function_tool
from ...http.routing import new_id
from ...llm.llm_engine import LLMEngine
from .messages_types import (
    Block,
    CountRequest,
    ImageInput,
    ImageSource,
    MessagesRequest,
    TextInput,
    ThinkingInput,
    ToolInput,
    ToolResultInput,
    ToolUseInput,
)

AnyBlock = TextInput | ImageInput | ThinkingInput | ToolUseInput | ToolResultInput
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
TEXT: dict[str, type[AnyBlock]] = {"text": TextInput}
RESULT: dict[str, type[AnyBlock]] = {**TEXT, "image": ImageInput}
BLOCKS: dict[str, dict[str, type[AnyBlock]]] = {
    "system": TEXT,
    "user": {**RESULT, "tool_result": ToolResultInput},
    "assistant": {**TEXT, "thinking": ThinkingInput, "tool_use": ToolUseInput},
}


def conversation(request: CountRequest, model: LLMEngine) -> Conversation:
    """Return the conversation of a request; that of one whose tokens are counted has no options."""
    messages = Messages()
    if request.system:
        messages.add("system", request.system, "system")
    for i, message in enumerate(request.messages):
        messages.add(message.role, message.content, f"messages[{i}].content")
    choice, config = request.tool_choice, request.output_config
    schema = config.format.schema if config is not None and config.format is not None else None
    asked = Conversation(
        id=new_id("msg_", 16),
        messages=messages.all,
        options={},
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or ())],
        tool_choice=_tool_choice(request),
        parallel_calls=choice is None or not choice.disable_parallel_tool_use,
        template_options=_template_options(request, model, prefilled=messages.prefilled),
        grammar=None if schema is None else {"json_schema": schema},
        places={
            **messages.places,
            **_tool_places(len(request.tools or ())),
            "prompt": "messages",
            "stop": "stop_sequences",
            "response_format": "output_config.format",
        },
        grammar_field="output_config.format",
    )
    if isinstance(request, MessagesRequest):
        thinking = request.thinking
        budget = thinking.budget_tokens if thinking is not None else None
        if budget is not None and budget >= request.max_tokens:
            raise InputError("expected fewer than max_tokens", where="thinking.budget_tokens")
        asked.max_tokens, asked.cut_to_context = request.max_tokens, True
        asked.priority, asked.stream = request.priority or 0, bool(request.stream)
        sampled = {"temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k}
        asked.options = {**sampled, "stop": request.stop_sequences}
    return asked


class Messages:
    """Messages of chat made from those of the request: results of calls come as messages of their own."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []
        self.places: dict[str, str] = {}
        self._calls: dict[str, str] = {}  # name of the tool of each call

    @property
    def prefilled(self) -> bool:
        """True if the last message is the beginning of the reply."""
        last = self.all[-1]
        return last["role"] == "assistant" and "tool_calls" not in last

    def add(self, role: str, content: str | Sequence[Block], where: str) -> None:
        """Add a message, whose content stands at `where`; what a user says in a row is one message."""
        if isinstance(content, str):
            blocks, places = list[AnyBlock]([TextInput(text=content)]), [where]
        else:
            places = [f"{where}[{i}]" for i in range(len(content))]
            blocks = [
                _block(block, BLOCKS[role], place) for block, place in zip(content, places, strict=True)
            ]
        if role == "assistant":
            self._add_reply(blocks, where)
            return
        for block, place in zip(blocks, places, strict=True):
            if isinstance(block, ToolResultInput):
                self._add_result(block, place)
        if not blocks or any(isinstance(block, TextInput | ImageInput) for block in blocks):
            if not self.all or self.all[-1]["role"] != role:
                self._append({"role": role, "content": []}, where)
            parts = self.all[-1]["content"]
            for block, place in zip(blocks, places, strict=True):
                if isinstance(block, TextInput | ImageInput):
                    self.places[f"messages[{len(self.all) - 1}].content[{len(parts)}]"] = place
                    parts.append(_part(block, place))

    def _add_reply(self, blocks: Sequence[AnyBlock], where: str) -> None:
        texts = [block.text for block in blocks if isinstance(block, TextInput)]
        thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingInput)]
        calls = [block for block in blocks if isinstance(block, ToolUseInput)]
        message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
                for call in calls
            ]
            self._calls |= {call.id: call.name for call in calls}
        self._append(message, where)

    def _add_result(self, result: ToolResultInput, where: str) -> None:
        if (name := self._calls.get(result.tool_use_id)) is None:
            raise InputError("no tool_use before it has this id", where=f"{where}.tool_use_id")
        content: str | list[Any] = result.content
        if not isinstance(content, str):
            places = [f"{where}.content[{i}]" for i in range(len(content))]
            content = [
                _part(_block(block, RESULT, place), place)
                for block, place in zip(content, places, strict=True)
            ]
        message = {"role": "tool", "tool_call_id": result.tool_use_id, "name": name, "content": content}
        self._append({**message, "is_error": True} if result.is_error else message, f"{where}.content")

    def _append(self, message: dict[str, Any], where: str) -> None:
        place = f"messages[{len(self.all)}]"
        self.places |= {place: where, f"{place}.content": where}
        self.all.append(message)


def _block(given: Block, kinds: dict[str, type[AnyBlock]], where: str) -> AnyBlock:
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise InputError(
            f"blocks of type {kind!r:.64} are not offered here: expected {', '.join(kinds)}",
            where=f"{where}.type",
        )
    return read_object(given, kinds[kind], where)


def _part(block: AnyBlock, where: str) -> dict[str, Any]:
    """Return a text or an image as a part of a chat message's content."""
    if isinstance(block, TextInput):
        return {"type": "text", "text": block.text}
    if not isinstance(block, ImageInput):
        raise InputError("expected a text or an image", where=where)
    source = read_object(block.source, ImageSource, f"{where}.source")
    return {"type": "image_url", "image_url": {"url": f"data:{source.media_type};base64,{source.data}"}}


def _tool(given: Block, where: str) -> dict[str, Any]:
    kind = given.get("type")
    if kind not in (None, "custom"):
        raise InputError(
            f"tools of type {kind!r:.64} are not offered: expected custom",
            where=f"{where}.type",
            hint="Server tools run at Anthropic; offer a tool of yours that does the same",
        )
    tool = read_object(given, ToolInput, where)
    return function_tool(tool.name, tool.description, tool.input_schema, strict=tool.strict)


def _tool_places(count: int) -> dict[str, str]:
    places = {f"tools[{i}].function": f"tools[{i}]" for i in range(count)}
    return places | {f"{place}.parameters": f"{name}.input_schema" for place, name in places.items()}


def _tool_choice(request: CountRequest) -> str | dict[str, Any] | None:
    choice = request.tool_choice
    if choice is None:
        return None
    if (choice.type == "tool") != (choice.name is not None):
        raise InputError("expected a name with type tool, and with no other", where="tool_choice.name")
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return CHOICES[choice.type]


def _template_options(request: CountRequest, model: LLMEngine, *, prefilled: bool) -> dict[str, Any]:
    """Return the chat template's variables."""
    options: dict[str, Any] = {"continue_final_message": True} if prefilled else {}
    if request.output_config is not None:
        options |= effort_options(model, request.output_config.effort, "output_config.effort")
    if request.thinking is not None:
        options |= thinking_options(request.thinking.type != "disabled")
    return options
