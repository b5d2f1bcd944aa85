"""Every form of output, with hostile contents: what was meant is read, however the text is cut."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infer.errors import InputError, UsageError
from infer.llm.text import forms
from infer.llm.text.forms import THOUGHTS, Form
from infer.llm.text.tool_parser import Parsed, ToolDelta, ToolParser, joined
from infer.llm.text.tools import Tool, constrain
from tests.support.output_forms import BARE, WRITERS, Calls, read_all

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
OUTPUTS = 50
UNMARKED = ["llama", "pythonic", "mistral_args", "harmony"]
ROOT = Path(__file__).resolve().parents[2]


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
        before, after = (chance.choice([*PROSE, "", "", "", ""]) for _ in range(2))
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
    return ToolParser(forms.get(name), TOOLS, separate=thought_of(name))


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


@pytest.mark.parametrize("name", forms.names())
def test_thoughts_that_are_not_asked_for_stay_in_the_content(name: str) -> None:
    thought, call = thought_of(name), WRITERS[name]([("now", {})])
    said = f"{thought.start}a {call} b{thought.end}"
    reader = ToolParser(forms.get(name), TOOLS)
    parsed = joined([*reader.push(said), *reader.push(call), *reader.finish()])
    assert parsed.reasoning is None
    assert parsed.content is not None
    assert parsed.content.startswith(f"{thought.start}a")
    assert len(parsed.calls) == 1


@pytest.fixture(scope="module")
def takes() -> Callable[[Any, str], bool]:
    """Return a check of a text by a constraint, with some marks as special tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("llguidance")
    from infer.llm.text.grammar.grammar import GrammarCache

    tokenizer = tokenizers.Tokenizer.from_file(str(ROOT / "models/pydoc_lm/tokenizer.json"))
    tokenizer.add_special_tokens(
        ["[TOOL_CALLS]", "<escape>", "<think>", "</think>", "<|channel|>", "<|end|>"]
    )
    grammars = GrammarCache(tokenizer, 4096, [0])

    def check(constraint: Any, text: str) -> bool:
        matcher = grammars.open(constraint)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        return all(matcher.accept(token) for token in ids) and matcher.complete

    return check


def written(name: str, calls: Calls) -> str:
    """Write calls as constraints do: Python's texts as JSON, without marks that may be absent, one id of Kimi's."""
    text = re.sub(r"<\|python_\w+\|>", "", WRITERS[name](calls))
    python = name in ("pythonic", "gemma3", "lfm2")
    return (text.replace("'", '"') if python else text).replace(":1<|tool_call_arg", ":0<|tool_call_arg")


@pytest.mark.parametrize("name", forms.names())
def test_a_required_call_is_written_in_the_form_of_the_model(name: str, takes: Any) -> None:
    schema = {
        "type": "object", "required": ["city"], "additionalProperties": False,
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "hot": {"type": "boolean"},
                       "unit": {"enum": ["c", "f"]}, "more": {"$ref": "#/$defs/more"}},
        "$defs": {"more": {"type": "object"}},
    }  # fmt: skip
    tools = [
        Tool("weather", schema),
        Tool("now", {"type": "object", "properties": {}, "additionalProperties": False}),
    ]
    constraint = constrain(tools, "required", forms.get(name))
    given = {"city": "<b>Bern</b>", "days": 2, "hot": False, "unit": "c", "more": {"a": 1}}
    if name in ("function_gemma", "gemma4"):  # whose objects have names without quotes, but in constraints
        del given["more"]
    full: Calls = [("weather", given)]
    for calls in (full, [("now", {})], [("weather", {"city": "a", "unit": "f"})]):
        text = written(name, calls)
        assert takes(constraint, text), text
        found = read_all(ToolParser(forms.get(name), tools), text)[1]
        assert [(call.name, json.loads(call.arguments)) for call in found] == calls
    several = forms.get(name).most > 1
    assert takes(constraint, written(name, [("now", {}), ("now", {})])) == several
    for wrong in ({"city": "a", "days": "two"}, {"days": 2}, {"city": "a", "town": "b"}):
        assert not takes(constraint, written(name, [("weather", wrong)])), wrong
    assert not takes(constraint, written(name, [("other", {})]))


@pytest.mark.parametrize("name", [name for name in forms.names() if name not in UNMARKED])
def test_arguments_of_strict_tools_are_valid_also_where_no_call_is(name: str, takes: Any) -> None:
    schema = {"type": "object", "properties": {"days": {"type": "integer"}}, "additionalProperties": False}
    tools = [Tool("weather", schema, strict=True)]
    constraint = constrain(tools, "auto", forms.get(name))
    for text in ("", "Well, <b> {x}.", f"Well.\n{written(name, [('weather', {'days': 2})])}"):
        assert takes(constraint, text), text
    assert not takes(constraint, f"Well.\n{written(name, [('weather', {'days': 'two'})])}")
    assert constrain([Tool("weather", schema)], "auto", forms.get(name)) is None


@pytest.mark.parametrize("name", UNMARKED)
def test_strict_holds_in_forms_without_a_mark_before_calls(name: str, takes: Any) -> None:
    schema = {"type": "object", "properties": {"days": {"type": "integer"}}, "additionalProperties": False}
    tools = [Tool("weather", schema, strict=True)]
    constraint = constrain(tools, "auto", forms.get(name))
    before = "<|channel|>final<|message|>" if name == "harmony" else ""
    for text in ('{"city": "Bern", "name": "Bob"}', "[1] Well, <b> {x}.", "[weather] (sunny)"):
        assert takes(constraint, before + text), text
        assert not read_all(ToolParser(forms.get(name), tools), before + text)[1]
    good, bad = (written(name, [("weather", {"days": days})]) for days in (2, "two"))
    assert takes(constraint, good)
    assert not takes(constraint, bad)
    assert not takes(constraint, f" <think>x</think> {bad}")
    assert not takes(constraint, written(name, [("weather", {"hours": 2})]))


def test_a_strict_tool_of_harmony_leaves_its_other_messages_free(takes: Any) -> None:
    constraint = constrain([Tool("f", {"type": "object"}, strict=True)], "auto", forms.get("harmony"))
    aside = "<|channel|>%s<|message|>I look.<|end|><|start|>assistant"
    call = written("harmony", [("f", {})])
    for before in ("", aside % "commentary", aside % "analysis" + aside % "commentary"):
        assert takes(constraint, before + call)
        assert takes(constraint, f"{before}<|channel|>final<|message|>No.")
    assert not takes(constraint, aside % "commentary to=functions.f")


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic", "gemma4"])
def test_a_schema_that_one_by_one_can_not_hold_is_refused_by_name(name: str) -> None:
    tool = Tool("f", {"type": "object", "properties": {"a": {"type": "string"}}, "minProperties": 1})
    with pytest.raises(InputError, match=r"minProperties of the arguments of f"):
        constrain([tool], "required", forms.get(name))


def test_a_constraint_binds_the_answer_and_not_the_thought(takes: Any) -> None:
    chosen = forms.choose("<think> <tool_call>")
    either = chosen.constrain({"json_object": True}, "assistant:")
    assert takes(either, '{"a": 1}')
    assert takes(either, '<think>\nwell, {"b" </x>\n</think>\n\n{"a": 1}')
    assert not takes(either, "well")
    opened = chosen.constrain({"regex": "a/b+"}, "assistant:<think>")
    assert takes(opened, "hm\n</think>\n\na/bb")
    assert not takes(opened, "a/b")
    closed = chosen.constrain({"choice": ["yes"]}, "<think>\n\n</think>")
    assert closed == {"choice": ["yes"]}
    harmony = forms.choose("<|channel|> <|message|>").constrain(
        {"choice": ["yes", "no"]}, "<|start|>assistant"
    )
    assert takes(harmony, "<|channel|>final<|message|>yes")
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    assert takes(harmony, f"{thought}<|channel|>final<|message|>no")
    assert not takes(harmony, "yes")


TEMPLATES = {
    "<tool_call> <function=f>": ("qwen3_coder", "none"),
    "<tool_call> <arg_key> <think>": ("glm", "think"),
    "<tool_call></think>": ("hermes", "think"),
    "[TOOL_CALLS] [THINK]": ("mistral", "mistral"),
    "[TOOL_CALLS] [ARGS]": ("mistral_args", "none"),
    "<|tool_call|> <|/tool_call|>": ("phi4", "none"),
    "<|tool_call|> Here is my thought process:": ("granite", "granite"),
    "<｜tool▁calls▁begin｜> ```json": ("deepseek", "none"),
    "<｜tool▁calls▁begin｜>": ("deepseek_v31", "none"),
    "<|channel|> <|message|>": ("harmony", "harmony"),
    "<|tool_call> <|channel>thought": ("gemma4", "gemma"),
    "<seed:tool_call> <seed:think>": ("seed", "seed"),
    "": ("hermes", "none"),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_shows_its_forms_and_by_what(template: str) -> None:
    chosen = forms.choose(template)
    assert (chosen.name, chosen.thought_name) == TEMPLATES[template]
    assert chosen.why
    assert chosen.thought_why


def test_named_forms_come_before_the_template() -> None:
    chosen = forms.choose("<tool_call><think>", "mistral", "none")
    assert (chosen.name, chosen.thought) == ("mistral", None)
    for wrong in (("mistrel", "auto"), ("auto", "thinks"), ("auto", "harmony")):
        with pytest.raises(UsageError, match="no form of"):
            forms.choose("", *wrong)
