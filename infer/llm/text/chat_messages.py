"""Messages of a conversation, as the OpenAI protocol has them, checked and made plain for a chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import InputError

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")  # names that templates have for a thought
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def read(messages: Sequence[Mapping[str, Any]], *, knows_developer: bool = False) -> list[Message]:
    """Validate chat messages: check roles, join text parts by line ends, parse arguments of tool calls.

    A developer's message is a system message unless the template knows it. Raises `InputError` that names the
    message and the field.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InputError(f"expected a list of messages, got {type(messages).__name__}", where="messages")
    if not messages:
        raise InputError("expected at least one message", where="messages")
    return [_message(each, f"messages[{i}]", knows_developer) for i, each in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str, knows_developer: bool) -> Message:
    if not isinstance(message, Mapping):
        raise InputError(f"expected an object with role and content, got {_kind(message)}", where=where)
    role = message.get("role")
    if role not in ROLES:
        raise InputError(f"expected a role of {', '.join(ROLES)}, got {role!r}", where=f"{where}.role")
    made: Message = {**plain(message), "role": role}
    if role == "developer" and not knows_developer:
        made["role"] = "system"
    calls = message.get("tool_calls")
    made["content"] = _content(message.get("content"), where, absent=role == "assistant")
    thought = made.get("reasoning_content") or made.get("reasoning")
    if thought:
        made |= dict.fromkeys(THOUGHT_FIELDS, thought)
    elif made["content"] is None and not calls:
        made["content"] = ""
    if calls:
        made["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(_list(calls, where))
        ]
    else:
        made.pop("tool_calls", None)
    return made


def _content(content: Any, where: str, *, absent: bool) -> str | None:
    if isinstance(content, str) or (content is None and absent):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InputError(f"expected text, got {_kind(content)}", where=f"{where}.content")
    return "\n".join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in TEXT_PARTS or not isinstance(part, Mapping):
        raise InputError(f"this model takes text, not {kind or _kind(part)}", where=where)
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise InputError(f"expected text, got {_kind(text)}", where=f"{where}.text")
    return text


def _call(call: Any, where: str) -> Message:
    """Parse `function.arguments` from JSON text, since templates take it as an object."""
    made = plain(call)
    function = made.get("function") if isinstance(made, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InputError("expected a function with a name", where=where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise InputError(f"expected JSON: {error}", where=f"{where}.function.arguments") from error
    return made


def _list(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InputError(f"expected a list, got {_kind(value)}", where=f"{where}.tool_calls")
    return value


def _kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__


def plain(value: Any) -> Any:
    """Copy a value to plain JSON types, so that templates can't call methods of a caller's objects."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return value if type(value) is kind else kind(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return f"<{type(value).__name__}>"
