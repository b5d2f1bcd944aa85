"""Chat templates: as transformers renders them, in a sandbox, with messages that were checked."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from infer.errors import ArtifactError, InputError
from infer.llm.text.chat_template import MAX_TEMPLATE, ChatTemplate

CHATML = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n"
)
TOOLS = """\
{{ bos_token }}
{% if tools %}
Tools: {% for tool in tools %}{{ tool | tojson }}
{% endfor %}
{% endif %}
{% set state = namespace(last=none) %}
{% for message in messages %}
    {% if message.role == "system" %}{% continue %}{% endif %}
    {% if message.role == "assistant" %}
{% generation %}<{{ message.content }}\
{% for c in message.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}>{% endgeneration %}
    {% else %}
[{{ message.role }}: {{ message["content"] }}]
    {% endif %}
    {% set state.last = message.role %}
{% endfor %}
{{ state.last }} {{ strftime_now("%Y") }}
{% if not messages %}{{ raise_exception("none") }}{% endif %}
"""
USER = {"role": "user", "content": "Grüße <b> & 'you'"}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "ü"}'}}
TURNS = [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "Hello."}, USER]
WITH_CALL = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def template(source: str, **others: str) -> ChatTemplate:
    return ChatTemplate({"default": source, **others}, TOKENS)


@pytest.mark.parametrize("source", [CHATML, TOOLS])
@pytest.mark.parametrize("messages", [[USER], TURNS])
@pytest.mark.parametrize("asks", [True, False])
def test_chat_templates_render_as_in_transformers(source: str, messages: list[dict], asks: bool) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    tools = [{"type": "function", "function": {"name": "add", "description": "a < b"}}]
    given = {"tools": tools, "add_generation_prompt": asks}
    (expected,), _ = utils.render_jinja_template([messages], chat_template=source, **given, **TOKENS)
    assert template(source).render(messages, **given) == expected


def test_arguments_of_tool_calls_are_objects_to_the_template() -> None:
    assert '<None{"a": 1, "b": "ü"}>' in template(TOOLS).render(WITH_CALL)


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "user\none\ntwo<" in template(CHATML).render([{"role": "user", "content": parts}])


def test_a_developer_message_is_rendered_as_system_for_older_templates() -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert template(CHATML).render(messages).startswith("<|im_start|>system")
    assert template("{# developer #}" + CHATML).render(messages).startswith("<|im_start|>developer")


def test_the_last_message_can_be_left_open() -> None:
    messages = [USER, {"role": "assistant", "content": "The answer is "}]
    said = template("{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}").render(
        messages, continue_final_message=True
    )
    assert said.endswith("assistant: The answer is ")


def test_variables_reach_the_template_and_tools_choose_theirs() -> None:
    made = template("plain {{ enable_thinking }}", tool_use="with {{ tools | length }}")
    assert made.render([USER], enable_thinking=False) == "plain False"
    assert made.render([USER], tools=[{}, {}]) == "with 2"


def test_strftime_now_is_today() -> None:
    assert str(datetime.now().year) in template("{{ strftime_now('%Y') }}").render([USER])


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "at least one message - at messages"),
        ("hello", "expected a list of messages, got str"),
        ([{"content": "x"}], r"a role of system, .* got None - at messages\[0\].role"),
        ([USER, {"role": "robot", "content": "x"}], r"got 'robot' - at messages\[1\].role"),
        ([{"role": "user"}], r"expected text, got nothing - at messages\[0\].content"),
        ([{"role": "user", "content": 5}], r"expected text, got int - at messages\[0\].content"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            r"takes text, not image_url - at .*content\[0\]",
        ),
        ([{"role": "assistant", "tool_calls": "x"}], "expected a list, got str"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {}}]}],
            r"a function with a name - at .*tool_calls\[0\]",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "expected JSON",
        ),
        (["x"], "an object with role and content, got str"),
    ],
)
def test_an_invalid_message_is_named_in_the_error(messages: list, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        template(CHATML).render(messages)


def test_a_refusal_by_the_template_keeps_its_message() -> None:
    with pytest.raises(InputError, match="refuses this: roles must alternate - at messages"):
        template("{{ raise_exception('roles must alternate') }}").render([USER])
    with pytest.raises(InputError, match="can't render this: TypeError"):
        template("{{ messages[0].content + 1 }}").render([USER])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ (messages | first).__init__.__globals__ }}",
        "{{ namespace(__class__=1) }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_templates_cannot_escape_the_sandbox(attack: str) -> None:
    with pytest.raises((InputError, ArtifactError)) as caught:
        raise InputError(f"harmless: {template(attack).render([USER])!r}")
    assert "harmless: ''" in str(caught.value) or "harmless" not in str(caught.value)


@pytest.mark.parametrize(
    "bomb",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ j }}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_never_ends_is_stopped(bomb: str) -> None:
    with pytest.raises(InputError, match="too long for the chat template|can't render|refuses"):
        template(bomb).render([USER])


def test_a_template_syntax_error_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ArtifactError, match=r"chat template 'default' can't be read: .* - at .*"):
        ChatTemplate.open(tmp_path).check()
    (tmp_path / "chat_template.jinja").write_text("x" * (MAX_TEMPLATE + 1))
    with pytest.raises(ArtifactError, match="more than the 262144 that are allowed"):
        ChatTemplate.open(tmp_path)


def test_templates_are_found_in_every_file_that_may_hold_one(tmp_path: Path) -> None:
    assert ChatTemplate.open(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "one", "bos_token": {"content": "<s>"}}))
    assert (found := ChatTemplate.open(tmp_path)).sources == {"default": "one"}
    assert found.tokens == {"bos_token": "<s>"}
    rows = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    config.write_text(json.dumps({"chat_template": rows}))
    assert ChatTemplate.open(tmp_path).sources == {"default": "a", "tool_use": "b"}
    (tmp_path / "chat_template.jinja").write_text("file")
    assert ChatTemplate.open(tmp_path).sources == {"default": "file", "tool_use": "b"}
