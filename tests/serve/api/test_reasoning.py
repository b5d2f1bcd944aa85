"""Thoughts of a model on /v1/chat/completions: beside the content, whole and streamed, in usage and templates."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from infer.llm.engine.requests import Output, Request
from infer.llm.text.chat_messages import read
from infer.llm.text.chat_template import ChatTemplate
from infer.llm.text.forms import choose
from infer.llm.text.tool_parser import ToolParser, joined
from infer.serve.generation.reply import Reply
from tests.support.fake_llm import TEMPLATE, FakeEngine, FakeLLMPredictor
from tests.support.fake_predictors import live

MESSAGES = [{"role": "user", "content": "x"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
THINKS = TEMPLATE + "{# <think> #}"
OPENS = TEMPLATE + "<think>\n"


def served(folder: Path, script: str, template: str = THINKS) -> FakeLLMPredictor:
    return FakeLLMPredictor(folder, engine=FakeEngine(script=script), template=template, context=512)


@pytest.mark.parametrize(
    ("template", "script", "reasoning", "content"),
    [
        (THINKS, "<think>\nIt is 2.\n</think>\n\nTwo.", "It is 2.", "Two."),
        (OPENS, "It is 2.\n</think>\n\nTwo.", "It is 2.", "Two."),
        (OPENS, "It is", "It is", ""),
        (THINKS, "Two <think>a</think>.", None, "Two <think>a</think>."),
        (TEMPLATE, "<think>a</think>b", None, "<think>a</think>b"),
        (TEMPLATE + "{# <|channel|><|message|> #}",
         "<|channel|>analysis<|message|>It is 2.<|end|><|start|>assistant<|channel|>final<|message|>Two.", "It is 2.",
         "Two."),
    ],
)  # fmt: skip
def test_thoughts_are_reasoning_whole_and_streamed(
    template: str, script: str, reasoning: str | None, content: str, tmp_path: Path
) -> None:
    with (
        live(served(tmp_path, script, template)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        ask: Any = {"model": "fake_llm", "messages": MESSAGES, "logprobs": True}
        whole = client.chat.completions.create(**ask)
        message = whole.choices[0].message.model_dump()
        assert message["content"] == content
        assert message.get("reasoning_content") == message.get("reasoning") == reasoning
        said, thought, tokens, usage = "", "", 0, None
        for chunk in client.chat.completions.create(
            **ask, stream=True, stream_options={"include_usage": True}
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                delta = choice.delta.model_dump(exclude_unset=True)
                assert delta.get("reasoning") == delta.get("reasoning_content")
                said += delta.get("content") or ""
                thought += delta.get("reasoning_content") or ""
                tokens += len(choice.logprobs.content or []) if choice.logprobs else 0
        assert (said, thought or None) == (content, reasoning)
        assert tokens == len(script)
        assert usage == whole.usage
        details = whole.usage.completion_tokens_details if whole.usage else None
        if reasoning is None and template == TEMPLATE:
            assert details is None
        else:
            counted = details.reasoning_tokens if details else None
            assert counted is not None
            assert (counted >= len(reasoning)) if reasoning else counted == 0
            assert counted <= len(script)


def test_tokens_of_a_draft_are_reasoning_as_far_as_the_thought_reaches() -> None:
    thinks = choose("<think>")
    model: Any = SimpleNamespace(
        language_model=SimpleNamespace(
            parser=lambda end, tools: ToolParser(thinks.form, tools, separate=thinks.thought)
        )
    )
    stream: Any = SimpleNamespace(prompts=[], choices=[None])
    tools: Any = SimpleNamespace(parallel=True, active=False, tools=[], forms=thinks)
    reply = Reply(model, Request(id="a", prompt=[1]), stream, tools, "")
    pieces = ["<think>", "It ", "is", "</think>", "Tw", "o."]
    ends = tuple(itertools.accumulate(map(len, pieces)))
    parts, finish = reply.read(
        Output(id="a", index=0, token_ids=tuple(range(6)), text="".join(pieces), ends=ends, finish="stop")
    )
    assert (joined(parts).reasoning, joined(parts).content, finish) == ("It is", "Two.", "stop")
    assert (reply.usage.completion_tokens, reply.usage.reasoning_tokens) == (6, 4)


def test_calls_follow_a_thought_and_none_are_made_in_it(tmp_path: Path) -> None:
    with live(served(tmp_path, f"<think>Maybe {CALL}</think>\n\nWell. {CALL}")) as server:
        body = {"model": "fake_llm", "messages": MESSAGES, "tools": [WEATHER]}
        choice = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["reasoning"] == f"Maybe {CALL}"
        assert choice["message"]["content"] == "Well."
        assert len(choice["message"]["tool_calls"]) == 1


def test_effort_and_variables_reach_the_template(tmp_path: Path) -> None:
    template = "{# <think> #}{{ reasoning_effort }}|{{ enable_thinking }}|{{ messages[0].content }}"
    with live(served(tmp_path, "a", template)) as server:
        for fields, prompt in (
            ({"reasoning_effort": "low"}, "low||x"),
            ({"reasoning_effort": "none"}, "none|False|x"),
            ({"chat_template_kwargs": {"enable_thinking": False}}, "|False|x"),
            ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "none|True|x"),
        ):
            body = {"model": "fake_llm", "messages": MESSAGES, **fields}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
            assert answer.json()["usage"]["prompt_tokens"] == len(prompt), answer.text
        body = {"model": "fake_llm", "messages": MESSAGES, "reasoning_effort": "much"}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
        assert answer.status_code in (400, 422)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_of_earlier_messages_reach_the_template(name: str) -> None:
    template = ChatTemplate(
        {"default": "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{% endfor %}"}, {}
    )
    messages = [{"role": "assistant", "content": "b", name: "hm"}]
    assert template.render(messages) == "hmhm"
    assert read(messages)[0]["reasoning"] == "hm"
