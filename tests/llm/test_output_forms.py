"""Every form of output, with hostile contents: what was meant is read, however the text is cut."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from infer.llm.text import forms
from infer.llm.text.forms import THOUGHTS, Form
from infer.llm.text.tool_parser import Parsed, ToolDelta, ToolParser, joined
from infer.llm.text.tools import Tool, tool_parser

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "flag": {"type": "boolean"},
        "tags": {"type": "array"},
        "more": {"type": "object"},
    },
}
TOOLS = [
    Tool("write", SCHEMA),
    Tool("read.file-2", SCHEMA),
    Tool("now", {"type": "object", "properties": {}}),
]
Arguments = dict[str, Any]
Calls = list[tuple[str, Arguments]]
OUTPUTS = 50


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


BLOCK = ("<tool_call>", "</tool_call>")
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
TEXTS = [
    "x", "", "  two\n\n  lines \n", 'say "hi", it\'s \\n and \\', "\u00e9\u4e2d\U0001f600 \u2028", '{"name": "write"}',
    "1, 2], {3: [4", "```\ncode\n```", "<think>no</think>", "a=1, b='2')", "%s {} </s>", "null", "True",
]  # fmt: skip
PROSE = [
    "Let me look.",
    "I call (two) tools, 1 < 2:",
    "\u00e9\u4e2d \U0001f600 {x} [y]",
    "a\n\n  b",
    "See `code`; <b>",
]


def thought_of(name: str) -> forms.Thought:
    return forms.get(name).thought or THOUGHTS["think"]


def texts_for(name: str) -> list[str]:
    """Return texts for arguments: also the marks of the form itself, but those that nothing tells from its own end."""
    form = forms.get(name)
    unsayable = {"function_gemma": ("<escape>",), "gemma4": ('<|"|>',)}.get(name, ())
    marks = [
        mark for mark in (*form.opening, *form.closing, *form.markup, *form.between) if mark not in unsayable
    ]
    return [*TEXTS, *marks, *(f"see {mark} there" for mark in marks)]


def outputs(name: str) -> Iterator[tuple[str, Parsed, Calls]]:
    """Make outputs with what is meant: the parts of a message, and its calls."""
    chance, write = random.Random(name), WRITERS[name]
    texts, thought = texts_for(name), thought_of(name)
    for _ in range(OUTPUTS):
        kinds: dict[str, Callable[[], Any]] = {
            "text": lambda: chance.choice(texts), "count": lambda: chance.choice([0, -3, 12345678901234567890]),
            "flag": lambda: chance.random() < 0.5, "tags": lambda: [chance.choice(texts), 1.5, None, [True]],
            "more": lambda: {"a": {"b": [chance.choice(texts)]}, "c": False},
        }  # fmt: skip
        calls: Calls = [
            (
                tool,
                {
                    key: kinds[key]()
                    for key in chance.sample(list(kinds), chance.randint(0, 2))
                    if tool != "now"
                },
            )
            for tool in chance.choices([tool.name for tool in TOOLS], k=chance.choice([0, 1, 1, 1, 2]))
        ]
        before, after = (chance.choice([*PROSE, ""]) for _ in range(2))
        after = after if calls and name != "harmony" else ""
        reasoning = chance.choice(["", "", f"Hm, {chance.choice(PROSE)} {chance.choice(texts)} so."])
        reasoning = "" if thought.end in reasoning or thought.start in reasoning else reasoning
        written = write(calls) if calls else ""
        if name in BARE and calls and not before and chance.random() < 0.5:
            written = BARE[name](calls := calls[:1] if name == "llama" else calls)
        text = before + written + after
        if name == "harmony":
            parts = [f"<|channel|>analysis<|message|>{reasoning}<|end|>"] if reasoning else []
            parts += (
                [f"<|channel|>{'commentary' if calls else 'final'}<|message|>{before}<|end|>"]
                if before
                else []
            )
            text = "<|start|>assistant".join([*parts, *([written] if written else [])])
        elif reasoning:
            text = f"{thought.start}\n{reasoning}\n{thought.end}\n\n{text}"
        yield text, Parsed(before + after or None, reasoning or None, []), calls


def parser(name: str) -> ToolParser:
    return tool_parser(forms.get(name), TOOLS, separate=thought_of(name))


def read(name: str, *pieces: str) -> tuple[str | None, str | None, list[tuple[str, str]]]:
    reader, deltas = parser(name), list[ToolDelta]()
    for piece in pieces:
        deltas += reader.push(piece)
    parsed = joined([*deltas, *reader.finish()])
    assert reader.finish_reason("stop") == ("tool_calls" if parsed.calls else "stop")
    return parsed.content, parsed.reasoning, [(call.name, call.arguments) for call in parsed.calls]


@pytest.mark.parametrize("name", forms.names())
def test_what_was_meant_is_read_wherever_the_text_is_cut(name: str) -> None:
    chance = random.Random(0)
    for text, meant, calls in outputs(name):
        whole = read(name, text)
        content, reasoning, found = whole
        assert (content, reasoning) == (meant.content, meant.reasoning), text
        assert [(tool, json.loads(arguments)) for tool, arguments in found] == calls, text
        for at in range(1, len(text)):
            assert read(name, text[:at], text[at:]) == whole, (text, at)
        for _ in range(4):
            cuts = sorted(chance.sample(range(len(text) + 1), min(len(text), chance.randint(2, 40))))
            assert read(name, *(text[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True))) == whole
        assert read(name, *text) == whole


@pytest.mark.parametrize("name", forms.names())
def test_prose_without_a_call_is_unchanged_in_every_form(name: str) -> None:
    form: Form = forms.get(name)
    for mark in (*form.opening, *form.closing):
        for text in (f"maybe {mark} is right", f" \n {mark}", mark, mark[:-1], f"{mark}\n{{x}} y"):
            assert read(name, text)[::2] == (text, []), text
            for at in range(1, len(text)):
                assert read(name, text[:at], text[at:])[::2] == (text, []), (text, at)


@pytest.mark.parametrize("name", forms.names())
def test_a_call_that_is_cut_short_is_never_a_whole_one(name: str) -> None:
    text = WRITERS[name]([("write", {"text": "half of the </text>", "more": {"a": [1, {"b": "c"}]}})])
    ((_, whole),) = read(name, text)[2]
    for at in range(len(text)):
        reader = parser(name)
        parsed = joined([*reader.push(text[:at]), *reader.finish()])
        for call in parsed.calls:
            assert call.arguments == whole or not reader.complete
            assert whole.startswith(call.arguments)
            assert reader.finish_reason("length") == "length"
