"""/v1/messages through the official anthropic client: messages, events in order, counts, refusals."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pydantic
import pytest
from anthropic.types import Message, MessageParam, RawMessageStreamEvent

from infer.llm.text.tool_parser import ToolDelta
from infer.serve.api.anthropic.messages_reply import MessageWriter
from infer.serve.generation import event_stream
from infer.serve.limits import ServeLimits
from tests.support.fake_llm import TEMPLATE, FakeEngine, FakeLLMPredictor
from tests.support.fake_predictors import Live, live
from tests.support.scripted_reply import ScriptedReply, thought_then_called

JSON = dict[str, Any]
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(RawMessageStreamEvent)
MESSAGE: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(MessageParam)
HELLO: JSON = {"role": "user", "content": "hi"}
WEATHER: JSON = {
    "name": "get_weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Basel"}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("fake_llm")
    caller = FakeEngine(script=CALLS, constrained='{"city": "Bern"}')
    with live(
        FakeLLMPredictor(folder, context=256), FakeLLMPredictor(folder, "caller", caller, context=512)
    ) as server:
        yield server


@pytest.fixture(scope="module")
def claude(server: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def ask(raw: httpx.Client, **fields: Any) -> JSON:
    body = {"model": "fake_llm", "messages": [HELLO], "max_tokens": 4, **fields}
    answer = raw.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    Message.model_validate(answer.json(), strict=True)
    return answer.json()


def streamed(raw: httpx.Client, **fields: Any) -> list[JSON]:
    body = {"model": "fake_llm", "messages": [HELLO], "max_tokens": 4, "stream": True, **fields}
    answer = raw.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    return events(answer.text)


def events(text: str) -> list[JSON]:
    """Events of a stream, each checked against the client's type and its own name."""
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] not in ("ping", "error"):
            EVENT.validate_python(event)
        found.append(event)
    return found


DELTAS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}


def check_order(found: list[JSON]) -> JSON:
    """Walk through the documented states; return the message that the events add up to."""
    assert found[0]["type"] == "message_start"
    message = found[0]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    block: JSON | None = None
    for event in found[1:-2]:
        if event["type"] == "content_block_start":
            assert block is None
            assert event["index"] == len(message["content"])
            block, text = event["content_block"], ""
        elif event["type"] == "content_block_delta":
            assert block is not None
            assert event["index"] == len(message["content"])
            text += event["delta"][DELTAS[event["delta"]["type"]]]
        else:
            assert event == {"type": "content_block_stop", "index": len(message["content"])}
            assert block is not None
            whole = {"text": text} if block["type"] == "text" else {"thinking": text}
            whole = {"input": json.loads(text)} if block["type"] == "tool_use" else whole
            message["content"].append({**block, **whole})
            block = None
    assert block is None
    assert [event["type"] for event in found[-2:]] == ["message_delta", "message_stop"]
    return {**message, **found[-2]["delta"], "usage": found[-2]["usage"]}


def test_a_message_has_all_fields(raw: httpx.Client) -> None:
    body = ask(raw, system="be", max_tokens=2, metadata={"user_id": "u"}, temperature=0.5, top_k=3, top_p=0.9)
    assert body["content"] == [{"type": "text", "text": "AB", "citations": None}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("max_tokens", None)
    assert body["usage"] == {
        "input_tokens": len("system:be;user:hi;assistant:") + 1 - 2,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": 2,
        "output_tokens_details": {"thinking_tokens": 0},
    }
    assert body["id"].startswith("msg_")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"model": "caller"},
        {"model": "caller", "tools": [WEATHER]},
        {"model": "caller", "tools": [WEATHER], "tool_choice": {"type": "none"}},
        {
            "model": "caller",
            "tools": [WEATHER],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        },
    ],
)
def test_events_come_in_order_and_add_up_to_the_message(raw: httpx.Client, fields: JSON) -> None:
    whole, message = ask(raw, **fields), check_order(streamed(raw, **fields))
    for body in (whole, message):
        for block in body["content"]:
            block.pop("id", None)
    assert {**message, "id": whole["id"]} == whole
    MESSAGE.validate_python({"role": "assistant", "content": whole["content"]})


def test_the_client_streams_and_collects_a_message(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(
        model="caller",
        max_tokens=50,
        messages=[HELLO],  # type: ignore[list-item]
        tools=[WEATHER],  # type: ignore[list-item]
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "Let me see."
    assert [block.type for block in final.content] == ["text", "tool_use", "tool_use"]
    assert [block.input for block in final.content if block.type == "tool_use"] == [
        {"city": "Bern"},
        {"city": "Basel"},
    ]
    assert final.stop_reason == "tool_use"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_tool_choice_constrains_the_reply(claude: anthropic.Anthropic, choice: Any) -> None:
    """The fake engine writes another text under a grammar."""
    found = claude.messages.create(
        model="caller",
        max_tokens=50,
        messages=[HELLO],  # type: ignore[list-item]
        tools=[WEATHER],  # type: ignore[list-item]
        tool_choice=choice,
    )
    assert [block.type for block in found.content] == ["text"]
    assert found.content[0].text == '{"city": "Bern"}'  # type: ignore[union-attr]


def test_an_output_format_constrains_the_reply(claude: anthropic.Anthropic) -> None:
    found = claude.messages.create(
        model="caller",
        max_tokens=50,
        messages=[HELLO],  # type: ignore[list-item]
        output_config={"format": {"type": "json_schema", "schema": WEATHER["input_schema"]}},
    )
    assert json.loads(found.content[0].text) == {"city": "Bern"}  # type: ignore[union-attr]


def test_results_of_calls_go_back_and_tokens_are_counted(claude: anthropic.Anthropic) -> None:
    """The fake template writes role and content of each message, so a count tells the messages."""
    first = claude.messages.create(
        model="caller",
        max_tokens=50,
        messages=[HELLO],  # type: ignore[list-item]
        tools=[WEATHER],  # type: ignore[list-item]
    )
    calls = [block.id for block in first.content if block.type == "tool_use"]
    results: list[JSON] = [
        {"type": "tool_result", "tool_use_id": calls[0], "content": "7", "is_error": True},
        {"type": "tool_result", "tool_use_id": calls[1], "content": [{"type": "text", "text": "8"}]},
    ]
    messages: Any = [
        HELLO,
        first.to_param(),
        {"role": "user", "content": [*results, {"type": "text", "text": "go on"}]},
    ]
    system: Any = [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}]
    count = claude.messages.count_tokens(model="caller", messages=messages, system=system)
    prompt = "system:S;user:hi;assistant:Let me see.;tool:7;tool:8;user:go on;assistant:"
    assert count.input_tokens == len(prompt) + 1
    found = claude.messages.create(model="caller", messages=messages, system=system, max_tokens=5)
    assert found.usage.input_tokens == count.input_tokens


def test_a_last_message_of_the_assistant_is_continued(claude: anthropic.Anthropic) -> None:
    messages: Any = [HELLO, {"role": "assistant", "content": "So "}]
    count = claude.messages.count_tokens(model="fake_llm", messages=messages)
    assert count.input_tokens == len("user:hi;assistant:So ") + 1


def test_what_a_user_says_in_a_row_is_one_message(claude: anthropic.Anthropic) -> None:
    blocks = [{"type": "text", "text": "there"}, {"type": "text", "text": "!"}]
    messages: Any = [HELLO, {"role": "user", "content": blocks}, {"role": "user", "content": "x"}]
    count = claude.messages.count_tokens(model="fake_llm", messages=messages)
    assert count.input_tokens == len("user:hi\nthere\n!\nx;assistant:") + 1


def test_more_tokens_than_fit_end_at_the_context(raw: httpx.Client) -> None:
    body = ask(raw, max_tokens=9999)
    assert body["stop_reason"] == "model_context_window_exceeded"
    usage = body["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"] == 256
    assert check_order(streamed(raw, max_tokens=9999))["stop_reason"] == body["stop_reason"]


def test_thinking_and_effort_go_to_the_template(tmp_path: Path) -> None:
    template = TEMPLATE + "{% if enable_thinking %}think{{ reasoning_effort }}{% endif %}"
    with (
        live(FakeLLMPredictor(tmp_path, template=template)) as server,
        anthropic.Anthropic(base_url=server.url, api_key="none") as client,
    ):

        def count(**fields: Any) -> int:
            return client.messages.count_tokens(
                model="fake_llm",
                messages=[HELLO],  # type: ignore[list-item]
                **fields,
            ).input_tokens

        plain = count()
        assert count(thinking={"type": "disabled"}) == plain
        assert count(thinking={"type": "enabled", "budget_tokens": 1024}) == plain + len("think")
        assert count(thinking={"type": "adaptive"}) == plain + len("think")
        assert count(output_config={"effort": "low"}) == plain + len("thinklow")


def test_a_stop_sequence_is_named(tmp_path: Path) -> None:
    reply: Any = ScriptedReply([ToolDelta(content="a")])
    writer = MessageWriter(reply, "m", 4)
    output: Any = type("Stopped", (), {"stopped_by": "\n\nHuman:"})
    message = writer.whole([output])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "\n\nHuman:")


def test_a_thought_is_a_block_of_its_own_before_the_text() -> None:
    writer = MessageWriter(thought_then_called(), "m", 4)  # type: ignore[arg-type]
    output: Any = type("Running", (), {"stopped_by": None})
    body = writer.begin() + b"".join(writer.events([output]) for _ in range(4)) + writer.end()
    message = check_order(events(body.decode()))
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
    assert message["content"][0]["thinking"] == "Let me think"
    assert message["content"][1]["text"] == "\n\nYes.\n"
    assert (message["content"][2]["input"], message["stop_reason"]) == ({}, "tool_use")


def test_a_call_that_was_cut_short_is_not_given_out_as_a_whole() -> None:
    reply: Any = ScriptedReply(
        [ToolDelta(content="a"), ToolDelta(index=0, id="c", name="f", arguments='{"x')], finish="length"
    )
    writer = MessageWriter(reply, "m", 4)
    message = writer.whole([type("Cut", (), {"stopped_by": None})])  # type: ignore[list-item]
    assert [block.__struct_config__.tag for block in message.content] == ["text"]
    assert message.stop_reason == "max_tokens"


SOURCE = {"type": "base64", "media_type": "image/png", "data": "aa"}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [1]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [HELLO, {"role": "user", "content": [{"type": "image", "source": SOURCE}]}]},
            "messages[1].content[0]",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image", "source": {"type": "url", "url": "http:"}}],
                    }
                ]
            },
            "messages[0].content[0].source.url",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        ({"messages": [{**HELLO, "content": "x" * 300}]}, "messages"),
        ({"messages": [{**HELLO, "content": "x" * 100_000}]}, "messages"),
        ({"messages": [{**HELLO, "content": "50%"}]}, "messages"),
        ({"system": 1}, "system"),
        ({"system": [{"type": "image", "source": SOURCE}]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [{**WEATHER, "input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
        ({"tools": [{**WEATHER, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {"type": "any"},
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
            },
            "output_config.format",
        ),
        ({"output_config": {"effort": "high"}}, "output_config.effort"),
        ({"thinking": {"type": "enabled", "budget_tokens": 4}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "display": "omitted"}}, "thinking.display"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": "x"}, "top_k"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"container": "x"}, "container"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"speed": "fast"}, "speed"),
        ({"metadata": {"user": "u"}}, "metadata"),
        ({"n": 2}, "n"),
    ],
)
def test_what_is_not_done_is_refused_by_name(raw: httpx.Client, fields: JSON, says: str) -> None:
    for stream in (False, True):
        body = {"model": "fake_llm", "messages": [HELLO], "max_tokens": 4, "stream": stream, **fields}
        answer = raw.post("/v1/messages", json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["type"] == "error"
        assert set(answer.json()["error"]) == {"type", "message"}
        assert answer.json()["error"]["type"] == "invalid_request_error"
        place = answer.json()["error"]["message"].partition(" - at ")[2].removeprefix("$.")
        assert place.startswith(says), place
    assert ask(raw)["stop_reason"] == "max_tokens"


def test_errors_have_the_types_of_the_client(raw: httpx.Client, claude: anthropic.Anthropic) -> None:
    create: Any = claude.messages.create
    with pytest.raises(anthropic.NotFoundError) as missing:
        create(model="nobody", messages=[HELLO], max_tokens=1)
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index,call-overload]
    with pytest.raises(anthropic.InternalServerError):
        create(model="fake_llm", messages=[{"role": "user", "content": "x!"}], max_tokens=4)
    deep = b'{"model": "fake_llm", "messages": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    headers = {"content-type": "application/json"}
    assert raw.post("/v1/messages", content=deep, headers=headers).json()["type"] == "error"
    blocks = [{"type": "text", "text": "x"}] * 1000
    body = {"model": "fake_llm", "messages": [{"role": "user", "content": blocks}], "max_tokens": 1}
    assert raw.post("/v1/messages", json=body).status_code == 400


def test_keys_are_taken_from_x_api_key_and_as_bearer(tmp_path: Path) -> None:
    with live(FakeLLMPredictor(tmp_path), api_key=["secret"]) as server:
        for options in ({"api_key": "secret"}, {"auth_token": "secret"}):
            with anthropic.Anthropic(base_url=server.url, max_retries=0, **options) as client:  # type: ignore[arg-type]
                assert client.messages.create(model="fake_llm", messages=[HELLO], max_tokens=1).id  # type: ignore[list-item]
        with (
            anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as client,
            pytest.raises(anthropic.AuthenticationError) as caught,
        ):
            client.messages.count_tokens(model="fake_llm", messages=[HELLO])  # type: ignore[list-item]
        assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index,call-overload]


def test_an_overloaded_server_answers_429(tmp_path: Path) -> None:
    limits = ServeLimits(max_queue_requests=1)
    engine = FakeEngine()
    engine.gate.clear()
    with live(FakeLLMPredictor(tmp_path, engine=engine), limits=limits) as server:
        with httpx.Client(base_url=server.url) as raw:
            body = {"model": "fake_llm", "messages": [HELLO], "max_tokens": 1}
            with raw.stream("POST", "/v1/messages", json={**body, "stream": True}) as waiting:
                texts = waiting.iter_text()
                next(texts)
                refused = httpx.post(f"{server.url}/v1/messages", json=body)
                engine.gate.set()
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1


def test_a_failure_in_a_stream_is_an_event_that_the_client_raises(
    raw: httpx.Client, claude: anthropic.Anthropic
) -> None:
    failing: Any = {"model": "fake_llm", "messages": [{"role": "user", "content": "x!"}], "max_tokens": 4}
    last = streamed(raw, **failing)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    with pytest.raises(anthropic.APIError, match="boom"):
        list(claude.messages.create(**failing, stream=True))


def test_a_waiting_stream_begins_and_pings_a_gone_one_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(event_stream, "PING_SECONDS", 0.02)
    engine = FakeEngine()
    engine.gate.clear()
    with live(FakeLLMPredictor(tmp_path, engine=engine)) as server, httpx.Client(base_url=server.url) as raw:
        body = {"model": "fake_llm", "messages": [HELLO], "max_tokens": 4, "stream": True}
        with raw.stream("POST", "/v1/messages", json=body) as answer:
            texts = answer.iter_text()
            assert next(texts).startswith("event: message_start\n")
            assert next(texts) == 'event: ping\ndata: {"type":"ping"}\n\n'
        deadline = time.monotonic() + 10
        while not engine.cancelled and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(engine.cancelled) == 1
        engine.gate.set()
