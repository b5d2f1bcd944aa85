"""Tool calls whose text is awkward: markers in values, thoughts, fences, cuts anywhere; each read right, or as text."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from infer.llm.text import forms
from infer.llm.text.forms import THOUGHTS, Thought
from infer.llm.text.tool_parser import ToolCall, ToolParser
from infer.llm.text.tools import Tool
from tests.support.output_forms import read_all

ANY_TEXT: dict[str, Any] = {"type": "string"}
SCHEMA = {
    "type": "object",
    "properties": {
        "path": ANY_TEXT,
        "text": ANY_TEXT,
        "zip": {"type": ["string", "null"]},
        "size": {"enum": ["1", "2", 3, None]},
        "code": {"anyOf": [{"type": "string", "minLength": 2}, {"type": "null"}]},
        "kind": {"$ref": "#/$defs/kind"},
        "count": {"type": "integer"},
        "flag": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "free": {"description": "no type"},
    },
    "$defs": {"kind": {"oneOf": [{"const": "7"}, {"const": "8"}]}},
    "additionalProperties": {"type": "string"},
}
TOOLS = [Tool("write", SCHEMA), Tool("read", SCHEMA)]
ARGUMENTS = {"text": 'see </tool_call> here, "<tool_call>" and \\ {[ \U0001f600', "path": "a"}
WRITTEN = json.dumps(ARGUMENTS)
DRAFT = '<tool_call>\n{"name": "write", "arguments": {"path": "DRAFT"}}\n</tool_call>'
OBJECTS = {
    "name first": f'{{"name": "write", "arguments": {WRITTEN}}}',
    "arguments first": f'{{"arguments": {WRITTEN}, "name": "write"}}',
    "id first": f'{{"id": "1", "name": "write", "arguments": {WRITTEN}}}',
    "id between": f'{{"name": "write", "id": "1", "arguments": {WRITTEN}}}',
    "a string": f'{{"name": "write", "arguments": {json.dumps(WRITTEN)}}}',
    "parameters": f'{{"name": "write", "parameters": {WRITTEN}}}',
    "wrapper": f'{{"type": "function", "function": {{"name": "write", "arguments": {WRITTEN}}}}}',
    "something after": f'{{"name": "write", "arguments": {WRITTEN}, "why": ["</tool_call>"]}}',
}


def xml(*values: tuple[str, str], name: str = "write") -> str:
    """Write a call as Qwen3-Coder does."""
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values)
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def parser(form: str, **thoughts: Thought) -> ToolParser:
    return ToolParser(forms.get(form), TOOLS, **thoughts)


def parse(text: str, form: str) -> tuple[str | None, list[ToolCall]]:
    return read_all(parser(form), text)


def plain(text: str, style: str = "hermes", **thoughts: Thought) -> tuple[str | None, list[tuple[str, Any]]]:
    content, found = read_all(parser(style, **thoughts), text)
    return content, [(call.name, json.loads(call.arguments)) for call in found]


def streamed(pieces: list[str], style: str) -> tuple[str, list[tuple[str, str]], bool]:
    """Return content, calls with the text of their arguments, and whether they are complete."""
    reader = parser(style)
    content, calls = "", list[tuple[str, str]]()
    for delta in [delta for piece in pieces for delta in reader.push(piece)] + reader.finish():
        content += delta.content
        if delta.name is not None:
            assert delta.index == len(calls)
            calls.append((delta.name, ""))
        if delta.index is not None:
            calls[delta.index] = (calls[delta.index][0], calls[delta.index][1] + delta.arguments)
    return content, calls, reader.complete


FIRST, SECOND = OBJECTS["name first"], OBJECTS["arguments first"]
NESTED = xml(("path", "x"), ("text", "y"))
XML_VALUES = {
    "ends": "use </parameter> and </function>",
    "end of a call": "see </tool_call> here",
    "end of a line": "a\n</parameter>\nb",
    "begin of a call": "maybe <tool_call> or <function=f> or <parameter=p>",
    "a call": NESTED,
    "a call and text": f"{NESTED}\nmore",
    "two calls": f"{NESTED}\n{NESTED} end",
    "a call in JSON": DRAFT,
    "an end and text": "</parameter>\n</function>\n</tool_call> more",
    "blanks": "  two\n\n  lines \n",
    "empty": "",
    "quotes": 'say "hi", \\n and \u2028',
}
TEXTS: dict[str, tuple[str, str]] = {
    **{f"hermes, {name}": ("hermes", f"Well.\n\n<tool_call>\n{body}\n</tool_call>") for name, body in OBJECTS.items()},
    **{f"llama, {name}": ("llama", body) for name, body in OBJECTS.items()},
    **{f"llama tag, {name}": ("llama", f"Well. <|python_tag|>{body}; {body}") for name, body in OBJECTS.items()},
    **{f"mistral, {name}": ("mistral", f"[TOOL_CALLS][{body}, {body}] x") for name, body in OBJECTS.items()},
    **{f"xml, {name}": ("hermes", f"a {xml(('text', value), ('path', 'b'))} c") for name, value in XML_VALUES.items()},
    "mistral, named": ("mistral", f"Well.[TOOL_CALLS]write[CALL_ID]ab[ARGS]{WRITTEN}[TOOL_CALLS]read{{}} x"),
    "mistral, no call": ("mistral", "a [TOOL_CALLS] is a marker, [TOOL_CALLS]so is this"),
    "one tag, two objects": ("hermes", f"<tool_call>\n{FIRST}\n{SECOND}\n</tool_call> x"),
    "one tag, a list": ("hermes", f"<tool_call>[{FIRST}, {SECOND}]</tool_call> x"),
    "xml, two functions": (
        "hermes", xml(("path", "1")).replace("</tool_call>", "<function=read>\n</function>\n</tool_call>\n") + NESTED),
    "thoughts": ("hermes", f"<think>\nI could {DRAFT} but\n</think>\n\n{DRAFT}"),
    "thoughts in thoughts": ("hermes", f"<think>a <think>{DRAFT}</think> b {DRAFT}</think> No. {DRAFT}"),
    "thoughts, llama": ("llama", f"<think>{OBJECTS['parameters']}</think>\n{OBJECTS['parameters']}"),
    "thoughts, mistral": ("mistral", f"[THINK]{OBJECTS['parameters']}[/THINK][TOOL_CALLS]read{{}}"),
    "fenced": ("hermes", f"Like:\n```xml\n{DRAFT}\n```\nor `` ` `` x\n````\n```{DRAFT}```\n````\n{DRAFT}"),
    "prose": ("hermes", "maybe <tool_call> is right \n <tool_call>\n and <tool> </tool_call>  <think"),
    "broken": ("hermes", f"<tool_call>\n{{'name': 'write', 'x': '{DRAFT} y'}}</tool_call> z {DRAFT}"),
    "broken arguments": ("hermes", '<tool_call>{"name": "write", "arguments": {"path": None}}</tool_call> z'),
    "no brace": ("hermes", '<tool_call>{"name": "read", "arguments": {}\n</tool_call> z'),
    "lines in strings": ("hermes", '<tool_call>{"name": "write", "arguments": {"text": "a\n\tb"}}</tool_call>'),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_where_a_text_is_cut_does_not_change_what_is_read(name: str) -> None:
    style, text = TEXTS[name]
    whole = streamed([text], style)
    assert streamed(list(text), style) == whole
    for at in range(len(text)):
        assert streamed([text[:at], text[at:]], style) == whole, at
    for size in (2, 3, 7):
        assert streamed([text[at : at + size] for at in range(0, len(text), size)], style) == whole


@pytest.mark.parametrize(
    "name", [name for name in TEXTS if name not in ("xml, an end and text", "broken arguments")]
)
def test_a_text_that_ends_early_gives_no_other_complete_call(name: str) -> None:
    style, text = TEXTS[name]
    _, calls, _ = streamed([text], style)
    for at in range(len(text)):
        _, found, complete = streamed([text[:at]], style)
        assert found == calls[: len(found)] or not complete
        if not complete:
            assert found[:-1] == calls[: len(found) - 1]
            assert calls[len(found) - 1][1].startswith(found[-1][1])
            with pytest.raises(ValueError, match=r"\w"):
                json.loads(found[-1][1])


@pytest.mark.parametrize("name", OBJECTS)
def test_markers_in_strings_are_no_markers_in_any_order_of_members(name: str) -> None:
    body = OBJECTS[name]
    calls = [("write", ARGUMENTS)]
    assert plain(f"<tool_call>\n{body}\n</tool_call>") == (None, calls)
    assert plain(body, "llama") == (None, calls)
    assert plain(f"[TOOL_CALLS][{body}]", "mistral") == (None, calls)
    assert plain(f"<tool_call>\n{body}\n{body}\n</tool_call>") == (None, calls * 2)


@pytest.mark.parametrize("name", XML_VALUES)
def test_tags_in_a_value_belong_to_the_value(name: str) -> None:
    value = XML_VALUES[name]
    call = ("write", {"text": value, "path": "b"})
    assert plain(xml(("text", value), ("path", "b"))) == (None, [call])
    assert plain(xml(("path", "b"), ("text", value))) == (None, [call])
    assert plain(f"a {xml(('text', value), ('path', 'b'))}\n{NESTED}")[1] == [
        call, ("write", {"path": "x", "text": "y"})]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("zip", "01234", "01234"), ("zip", "12", "12"), ("zip", "null", None), ("size", "1", "1"), ("size", "3", 3),
        ("size", "null", None), ("code", "12", "12"), ("code", "null", None), ("kind", "7", "7"), ("count", "3", 3),
        ("count", "many", "many"), ("flag", "True", True), ("flag", "false", False), ("tags", '["1", 2]', ["1", 2]),
        ("tags", "[1,", "[1,"), ("free", "12", 12), ("free", "x", "x"), ("free", "NaN", "NaN"), ("text", "12", "12"),
        ("text", "null", "null"), ("other", "12", "12"),
    ],
)  # fmt: skip
def test_a_value_in_tags_has_the_type_its_whole_schema_allows(key: str, written: str, value: Any) -> None:
    assert plain(xml((key, written)))[1] == [("write", {key: value})]


def test_a_call_in_tags_that_is_cut_short_is_text() -> None:
    cut = xml(("path", "a"), ("text", "half of the"))[: -len("\n</parameter>\n</function>\n</tool_call>")]
    assert plain(cut) == (cut, [])


def test_a_parameter_given_twice_is_no_call() -> None:
    text = xml(("path", "a"), ("text", "b\n</parameter>\n<parameter=path>\n/etc/passwd"))
    assert plain(text) == (text, [])


def test_calls_in_thoughts_are_not_made() -> None:
    text = f"<think>\nI could {DRAFT} but not yet\n</think>\nNo."
    assert plain(text) == (text, [])
    nested = f"<think>a <think>{DRAFT}</think> {DRAFT}</think>"
    assert plain(nested) == (nested, [])
    behind = f"I could {DRAFT}</think>\n\n{DRAFT}"
    assert plain(behind, opened=THOUGHTS["think"]) == (
        f"I could {DRAFT}</think>",
        [("write", {"path": "DRAFT"})],
    )
    assert plain(f"<think>{DRAFT}") == (f"<think>{DRAFT}", [])


def test_calls_in_fenced_code_are_not_made() -> None:
    text = f"Write\n```\n{DRAFT}\n```"
    assert plain(text) == (text, [])
    assert plain(f"{text}\n{DRAFT}") == (text, [("write", {"path": "DRAFT"})])


def test_a_call_within_what_is_no_call_is_not_made() -> None:
    for text in (
        f"<tool_call>\n{{'text': '{DRAFT}'}}",
        xml(("text", DRAFT))[:-30],
        f"<tool_call>{{\"a\": '{DRAFT}'}}",
    ):
        assert plain(text) == (text, [])


def test_the_reason_says_whether_calls_are_complete() -> None:
    for text, stop, length in (
        (DRAFT, "tool_calls", "length"), (DRAFT[:-25], "stop", "length"), ("No.", "stop", "length"),
    ):  # fmt: skip
        reader = parser("hermes")
        read_all(reader, text)
        assert (reader.finish_reason("stop"), reader.finish_reason("length")) == (stop, length)
        assert reader.finish_reason(None) is None


@pytest.mark.parametrize("arguments", ["{}", "", "null", '""', '"{}"', '" "'])
def test_empty_arguments_are_an_empty_object(arguments: str) -> None:
    member = f', "arguments": {arguments}' if arguments else ""
    assert plain(f'<tool_call>{{"name": "read"{member}}}</tool_call>') == (None, [("read", {})])


@pytest.mark.parametrize("first", ["name", "arguments"])
def test_arguments_are_passed_on_as_the_model_wrote_them(first: str) -> None:
    written = (
        '{"a": 123456789012345678901234567890, "b": 1e999, "a": 0.10, "c": "\\ud83d", "\u0434": "\u00e9"}'
    )
    members = [f'"arguments": {written}', '"name": "write"']
    body = ", ".join(members if first == "arguments" else members[::-1])
    _, found = parse(f"<tool_call>{{{body}}}</tool_call>", "hermes")
    assert found[0].arguments == written


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"arguments": {"text": "\\ud83d"}, "name": "write"}\n</tool_call>',
        '<tool_call>\n{"name": "write", "arguments": {"text": "\ud83d"}}\n</tool_call>',
        '<tool_call>\n{"name": "write", "arguments": "{\\"text\\": \\"\\ud83d\\"}"}\n</tool_call>',
        '<tool_call>\n{"name": "\\ud83d", "arguments": {}}\n</tool_call>',
        xml(("free", '"\\ud83d"')),
        xml(("text", "\ud83d")),
    ],
)
def test_lone_surrogates_can_be_sent(text: str) -> None:
    _, found = parse(text, "hermes")
    msgspec.json.encode([(call.name, call.arguments) for call in found])


@pytest.mark.parametrize(
    "text", [TEXTS["prose"][1], "maybe <tool_call> is right", " \n x \n\n", "<tool_call>\n", "<"]
)
@pytest.mark.parametrize("style", ["hermes", "llama", "mistral"])
def test_prose_without_calls_is_unchanged(text: str, style: str) -> None:
    assert plain(text, style) == (text, [])
