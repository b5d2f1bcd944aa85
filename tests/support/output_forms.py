"""Writers of tool calls, as models of each form write them, also without the mark before them that may be absent."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from infer.llm.text.tool_parser import ToolCall, ToolParser, joined

Calls = list[tuple[str, dict[str, Any]]]  # names and arguments


def read_all(parser: ToolParser, text: str) -> tuple[str | None, list[ToolCall]]:
    """Read a whole output: its content (None when nothing is left) and its calls."""
    parsed = joined((*parser.push(text), *parser.finish()))
    return parsed.content, parsed.calls


def _objects(key: str, calls: Calls, separator: str = ", ") -> str:
    return separator.join(json.dumps({"name": name, key: given}, ensure_ascii=False) for name, given in calls)


def _named(pattern: str, calls: Calls) -> str:
    return "".join(
        pattern.replace("NAME", name).replace("INDEX", str(i)).replace("ARGUMENTS", json.dumps(given))
        for i, (name, given) in enumerate(calls)
    )


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _tagged(call: str, key: str, end: str, calls: Calls, separator: str = "\n") -> str:
    return separator.join(
        call.replace("NAME", name).replace(
            "VALUES", "".join(key.replace("KEY", k) + _value(v) + end for k, v in given.items())
        )
        for name, given in calls
    )


def _python(calls: Calls, separator: str = ", ") -> str:
    return separator.join(
        f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls
    )


def _gemma(mark: str, opening: str, closing: str, calls: Calls) -> str:
    def written(value: Any) -> str:
        if isinstance(value, str):
            return f"{mark}{value}{mark}"
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{written(inner)}" for key, inner in value.items()) + "}"
        if isinstance(value, list):
            return f"[{','.join(map(written, value))}]"
        return json.dumps(value)

    return "".join(f"{opening}call:{name}{written(given)}{closing}" for name, given in calls)


DEEPSEEK = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>\n"
CODER = (
    "<tool_call>\n<function=NAME>\nVALUES</function>\n</tool_call>",
    "<parameter=KEY>\n",
    "\n</parameter>\n",
)
INVOKE = ('<invoke name="NAME">\nVALUES</invoke>', '<parameter name="KEY">', "</parameter>\n")
GLM = ("<tool_call>NAME\nVALUES</tool_call>", "<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n")
SEED = ("<function=NAME>\nVALUES</function>", "<parameter=KEY>", "</parameter>\n")
KIMI = "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>"
HARMONY = "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>"
WRITERS: dict[str, Callable[[Calls], str]] = {
    "hermes": lambda calls: "\n".join(
        f"<tool_call>\n{_objects('arguments', [c])}\n</tool_call>" for c in calls
    ),
    "qwen3_coder": lambda calls: _tagged(*CODER, calls),
    "glm": lambda calls: _tagged(*GLM, calls),
    "minimax": lambda calls: f"<minimax:tool_call>\n{_tagged(*INVOKE, calls)}\n</minimax:tool_call>",
    "seed": lambda calls: f"<seed:tool_call>\n{_tagged(*SEED, calls)}\n</seed:tool_call>",
    "llama": lambda calls: f"<|python_tag|>{_objects('parameters', calls, '; ')}",
    "pythonic": lambda calls: f"<|python_start|>[{_python(calls)}]<|python_end|>",
    "mistral": lambda calls: f"[TOOL_CALLS][{_objects('arguments', calls)}]",
    "mistral_args": lambda calls: _named("[TOOL_CALLS]NAME[ARGS]ARGUMENTS", calls),
    "phi4": lambda calls: f"<|tool_call|>[{_objects('arguments', calls)}]<|/tool_call|>",
    "granite": lambda calls: f"<|tool_call|>[{_objects('arguments', calls)}]",
    "deepseek": lambda calls: f"<｜tool▁calls▁begin｜>{_named(DEEPSEEK, calls)[:-1]}<｜tool▁calls▁end｜>",
    "deepseek_v31": lambda calls: (
        "<｜tool▁calls▁begin｜>"
        + _named("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>", calls)
        + "<｜tool▁calls▁end｜>"
    ),
    "kimi": lambda calls: f"<|tool_calls_section_begin|>{_named(KIMI, calls)}<|tool_calls_section_end|>",
    "gemma3": lambda calls: "```tool_code\n" + _python(calls, "\n") + "\n```",
    "function_gemma": lambda calls: _gemma("<escape>", "<start_function_call>", "<end_function_call>", calls),
    "gemma4": lambda calls: _gemma('<|"|>', "<|tool_call>", "<tool_call|>", calls),
    "lfm2": lambda calls: f"<|tool_call_start|>[{_python(calls)}]<|tool_call_end|>",
    "harmony": lambda calls: "<|start|>assistant".join(_named(HARMONY, [call]) for call in calls),
}
BARE: dict[str, Callable[[Calls], str]] = {
    "llama": lambda calls: _objects("parameters", calls[:1]),
    "pythonic": lambda calls: f"[{_python(calls)}]",
    "mistral": lambda calls: f"[{_objects('arguments', calls)}]",
}
