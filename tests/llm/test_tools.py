"""Tool calls: what is constrained, what is read from whole outputs, and from outputs cut anywhere."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from infer.errors import InputError
from infer.llm.text import forms
from infer.llm.text.tool_parser import ToolCall, ToolParser
from infer.llm.text.tools import Tool, check_choice, check_tools, constrain
from tests.support.output_forms import read_all

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
           "required": ["city"], "additionalProperties": False}  # fmt: skip
OPENAI = [
    {"type": "function", "function": {"name": "weather", "description": "d", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
TOOLS = check_tools(OPENAI)
ARGUMENTS = '{"city": "Saint-É{\\"}tienne", "days": 2}'
WRITTEN = '{"name": "weather", "arguments": $}'.replace("$", ARGUMENTS)
LLAMA = WRITTEN.replace("arguments", "parameters")
HERMES = f"<tool_call>\n{WRITTEN}\n</tool_call>"
LIST = f'[{WRITTEN}, {{"name": "now", "arguments": {{}}}}]'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
BOTH = [("weather", json.loads(ARGUMENTS)), ("now", {})]

# style, output, content, calls
CASES: dict[str, tuple[str, str, str | None, list[tuple[str, Any]]]] = {
    "hermes": ("hermes", HERMES, None, BOTH[:1]),
    "hermes, text before": ("hermes", f"Let me look.\n\n{HERMES}", "Let me look.", BOTH[:1]),
    "hermes, two": ("hermes", f"{HERMES}\n{NOW}", None, BOTH),
    "hermes, two and text after": ("hermes", f"a {HERMES} {NOW} b", "a b", BOTH),
    "hermes, no end tag": ("hermes", HERMES.removesuffix("\n</tool_call>"), None, BOTH[:1]),
    "hermes, half an end tag": ("hermes", HERMES.removesuffix("tool_call>"), None, BOTH[:1]),
    "hermes, no end tag between": ("hermes", HERMES.removesuffix("</tool_call>") + NOW, None, BOTH),
    "hermes, arguments first": (
        "hermes", '<tool_call>{"arguments": {"city": "x"}, "name": "weather"}</tool_call>', None,
        [("weather", {"city": "x"})]),
    "hermes, arguments as a string": (
        "hermes", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"x\\"}"}</tool_call>', None,
        [("weather", {"city": "x"})]),
    "hermes, unknown tool": (
        "hermes", '<tool_call>{"name": "other", "arguments": {"a": [1, {"b": 2}]}}</tool_call>', None,
        [("other", {"a": [1, {"b": 2}]})]),
    "hermes, function tags": (
        "hermes", "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>", None, [("weather", {"city": "12", "days": 3})]),
    "hermes, not JSON": ("hermes", "<tool_call>what</tool_call> x", "<tool_call>what</tool_call> x", []),
    "hermes, only text": ("hermes", "1 < 2, <tool and <b>\n", "1 < 2, <tool and <b>\n", []),
    "hermes, half a marker": ("hermes", "see <tool_ca", "see <tool_ca", []),
    "hermes, JSON text": ("hermes", '{"name": "weather", "arguments": {}}', '{"name": "weather", "arguments": {}}', []),
    "llama": ("llama", LLAMA, None, BOTH[:1]),
    "llama, typed": ("llama", '{"type": "function", "name": "now", "parameters": {}}', None, BOTH[1:]),
    "llama, tag": ("llama", '<|python_tag|>{"name": "now", "parameters": {}}', None, BOTH[1:]),
    "llama, text and tag": ("llama", 'Well.\n<|python_tag|>{"name": "now", "parameters": {}}', "Well.", BOTH[1:]),
    "llama, two": (
        "llama", f'{LLAMA}; {{"name": "now", "parameters": {{}}}}', None, BOTH),
    "llama, JSON that is no call": ("llama", '{"city": {"name": "x"}} y', '{"city": {"name": "x"}} y', []),
    "llama, JSON with a name": ("llama", '{"name": "weather", "age": 3}', '{"name": "weather", "age": 3}', []),
    "llama, another's name": ("llama", '{"name": "x", "parameters": {}}', '{"name": "x", "parameters": {}}', []),
    "llama, cut JSON": ("llama", '{"name": "wea', '{"name": "wea', []),
    "llama, text": ("llama", "\n\nHello {", "\n\nHello {", []),
    "mistral": ("mistral", f"[TOOL_CALLS][{WRITTEN}]", None, BOTH[:1]),
    "mistral, two": ("mistral", f"[TOOL_CALLS] {LIST}", None, BOTH),
    "mistral, marker skipped": ("mistral", LIST, None, BOTH),
    "mistral, named": ("mistral", f"[TOOL_CALLS]weather{ARGUMENTS}[TOOL_CALLS]now[ARGS]{{}}", None, BOTH),
    "mistral, text before": ("mistral", "Well. [TOOL_CALLS]now{}", "Well.", BOTH[1:]),
    "mistral, a list": ("mistral", "[1, 2, 3]", "[1, 2, 3]", []),
    "mistral, a list of objects": ("mistral", '[{"a": 1}]', '[{"a": 1}]', []),
}  # fmt: skip


def reader_of(form: str) -> ToolParser:
    return ToolParser(forms.get(form), TOOLS)


def plain(calls: list[ToolCall]) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("name", CASES)
def test_tool_calls_and_content_are_parsed_from_a_full_output(name: str) -> None:
    style, text, content, calls = CASES[name]
    found, read = read_all(reader_of(style), text)
    assert plain(read) == calls
    assert found == content


@pytest.mark.parametrize("name", CASES)
def test_streamed_parsing_does_not_depend_on_the_chunks(name: str) -> None:
    style, text, content, calls = CASES[name]
    for seed in range(12):
        chance = random.Random(seed)
        reader, spoken, at = reader_of(style), "", 0
        names: list[str] = []
        arguments: list[str] = []
        pieces = []
        while at < len(text):
            size = 1 if seed == 0 else chance.randint(1, 9)
            pieces.append(text[at : at + size])
            at += size
        deltas = [delta for piece in pieces for delta in reader.push(piece)] + reader.finish()
        for delta in deltas:
            spoken += delta.content
            if delta.index is not None and delta.name is not None:
                assert delta.index == len(names)
                assert delta.id
                names.append(delta.name)
                arguments.append("")
            if delta.index is not None:
                assert delta.index == len(names) - 1
                arguments[-1] += delta.arguments
        assert list(zip(names, map(json.loads, arguments), strict=True)) == calls
        assert (spoken if spoken.strip() or not calls else None) == content


def test_arguments_are_streamed_as_they_come() -> None:
    reader = reader_of("hermes")
    first = reader.push('<tool_call>\n{"name": "weather", "arguments": {"ci')
    assert [(d.name, d.arguments) for d in first] == [("weather", ""), (None, '{"ci')]
    assert [d.arguments for d in reader.push('ty": "x"')] == ['ty": "x"']


def test_text_is_streamed_except_what_may_become_a_marker() -> None:
    reader = reader_of("hermes")
    assert [d.content for d in reader.push("Hello <tool")] == ["Hello"]
    assert [d.content for d in reader.push("s> and")] == [" <tools> and"]


def test_json_that_can_not_be_a_call_is_not_held_back() -> None:
    reader = reader_of("llama")
    assert "".join(d.content for d in reader.push('{"city": "Pa')) == '{"city": "Pa'


def test_ids_differ_and_have_the_length_that_mistrals_templates_want() -> None:
    _, calls = read_all(reader_of("mistral"), CASES["mistral, two"][1])
    assert [len(call.id) for call in calls] == [9, 9]
    assert calls[0].id != calls[1].id
    assert read_all(reader_of("hermes"), HERMES)[1][0].id.startswith("call_")


@pytest.mark.parametrize(
    ("template", "style"),
    [
        ('{% for t in tools %}…<tool_call>\n{"name": <function-name>…', "hermes"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ('Respond in the format {"name": function name, "parameters": dictionary}', "llama"),
        ("{{ messages }}", "hermes"),
        ("", "hermes"),
    ],
)
def test_the_form_comes_from_the_chat_template(template: str, style: str) -> None:
    assert forms.choose(template).name == style


@pytest.mark.parametrize(
    ("tools", "where"),
    [
        ([{"type": "function"}], "tools[0]"),
        ([{"type": "retrieval", "function": {"name": "a"}}], "tools[0]"),
        ([{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
        ([OPENAI[1], OPENAI[1]], "tools[1].function.name"),
        ([{"type": "function", "function": {"name": "a", "parameters": 5}}], "tools[0].function.parameters"),
        ([{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}],
         "tools[0].function.parameters"),
        ([{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)], "tools"),
    ],
)  # fmt: skip
def test_invalid_tools_are_refused_with_their_position(tools: list[dict[str, Any]], where: str) -> None:
    with pytest.raises(InputError) as caught:
        check_tools(tools)
    assert caught.value.where == where


def test_the_choice_of_a_tool_is_checked() -> None:
    assert check_choice(None, TOOLS) == "auto"
    assert check_choice(None, []) == "none"
    assert check_choice({"type": "function", "function": {"name": "now"}}, TOOLS) == "now"
    for wrong in ("sometimes", {"type": "function", "function": {"name": "x"}}, {"type": "custom"}, 5):
        with pytest.raises(InputError):
            check_choice(wrong, TOOLS)
    with pytest.raises(InputError, match="no tools"):
        check_choice("required", [])


def test_tool_choice_auto_does_not_constrain_the_output() -> None:
    assert constrain(TOOLS, "none", forms.get("hermes")) is None
    assert constrain(TOOLS, "auto", forms.get("hermes")) is None


@pytest.fixture(scope="module")
def grammars() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("llguidance")
    from infer.llm.text.grammar.grammar import GrammarCache

    folder = Path(__file__).resolve().parents[2] / "models" / "pydoc_lm"
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["[TOOL_CALLS]"])
    tokenizer.add_tokens(["<tool_call>"])
    return tokenizer, GrammarCache(tokenizer, 4096, [0])


def takes(grammars: Any, constraint: Any, text: str) -> bool:
    tokenizer, compiled = grammars
    matcher = compiled.open(constraint)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return all(matcher.accept(token) for token in ids) and matcher.complete


@pytest.mark.parametrize("style", ["hermes", "llama", "mistral"])
def test_tool_choice_required_allows_valid_calls_only(grammars: Any, style: str) -> None:
    constraint = constrain(TOOLS, "required", forms.get(style))
    one, other = CASES[style][1], CASES[style][1].replace("weather", "now")
    assert takes(grammars, constraint, one)
    assert not takes(grammars, constraint, other)  # `now` has no arguments
    assert not takes(grammars, constraint, one.replace('"city"', '"town"'))
    assert not takes(grammars, constraint, one.replace("2", '"two"'))
    assert not takes(grammars, constraint, f"Well. {one}")
    assert takes(grammars, constraint, other.replace(ARGUMENTS, "{}"))
    assert takes(grammars, constraint, CASES[f"{style}, two"][1].replace("] [", "][")) == (style != "llama")


def test_a_named_choice_calls_that_tool_once(grammars: Any) -> None:
    constraint = constrain(TOOLS, "now", forms.get("hermes"))
    assert takes(grammars, constraint, NOW)
    assert not takes(grammars, constraint, HERMES)
    assert not takes(grammars, constraint, f"{NOW}\n{NOW}")


def test_parallel_tool_calls_false_allows_one_call(grammars: Any) -> None:
    constraint = constrain(TOOLS, "required", forms.get("hermes"), parallel=False)
    assert takes(grammars, constraint, HERMES)
    assert not takes(grammars, constraint, f"{HERMES}\n{NOW}")


def test_schema_references_resolve_within_the_schema_of_their_tool(grammars: Any) -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#"}, "size": {"$ref": "#/$defs/size"}},
            "additionalProperties": False, "$defs": {"size": {"type": "integer"}},
            "default": {"$ref": "#"}}  # fmt: skip
    constraint = constrain([Tool("now", {}), Tool("walk", node)], "walk", forms.get("hermes"))
    call = '<tool_call>\n{"name": "walk", "arguments": {"next": {"size": %s}, "size": 1}}\n</tool_call>'
    assert takes(grammars, constraint, call % "3")
    assert not takes(grammars, constraint, call % '"3"')


def test_a_schema_that_can_not_be_enforced_is_refused_by_name(grammars: Any) -> None:
    tool = Tool("f", {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}})
    with pytest.raises(InputError, match="uniqueItems"):
        grammars[1].check(constrain([tool], "required", forms.get("hermes")))
