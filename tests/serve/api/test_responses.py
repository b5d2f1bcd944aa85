"""/v1/responses through the official openai client: bodies, events in order, kept responses, refusals."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseInputItemParam, ResponseStreamEvent

from infer.errors import UsageError
from infer.serve.api.responses.response_store import OVERHEAD, ResponseStore, StoredResponse
from infer.serve.api.responses.responses_reply import ResponseWriter
from infer.serve.api.responses.responses_types import Reasoning, ResponseObject, TextConfig
from infer.serve.generation import event_stream
from infer.serve.limits import ServeLimits
from tests.support.fake_llm import TEMPLATE, FakeEngine, FakeLanguageModel, FakeLLMPredictor
from tests.support.fake_predictors import Live, live
from tests.support.scripted_reply import thought_then_called

JSON = dict[str, Any]
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
ITEMS: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(list[ResponseInputItemParam])
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": None,
}
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Basel"}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("fake_llm")
    with live(
        FakeLLMPredictor(folder, context=256),
        FakeLLMPredictor(folder, "mute", template=None),
        FakeLLMPredictor(
            folder, "caller", FakeEngine(script=CALLS, constrained='{"city": "Bern"}'), context=512
        ),
    ) as server:
        yield server


def ask(raw: httpx.Client, **fields: Any) -> JSON:
    answer = raw.post("/v1/responses", json={"model": "fake_llm", "input": "x", **fields})
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json(), strict=True)
    return answer.json()


def events(text: str) -> list[JSON]:
    """Events of a stream, each checked against the client's type and its own name."""
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event)
        found.append(event)
    return found


def streamed(raw: httpx.Client, **fields: Any) -> list[JSON]:
    answer = raw.post("/v1/responses", json={"model": "fake_llm", "input": "x", "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    return events(answer.text)


PARTS = {"output_text": "text", "reasoning_text": "text", "function_call_arguments": "arguments"}


def check_order(found: list[JSON], end: str = "response.completed") -> list[JSON]:
    """Walk through the documented states; return the items that the events add up to."""
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    assert found[-1]["type"] == end
    items, state, item, text = list[JSON](), "between", dict[str, Any](), ""
    for event in found[2:-1]:
        kind = event["type"].removeprefix("response.")
        assert event["output_index"] == len(items)
        if kind == "output_item.added":
            assert state == "between"
            item, text = event["item"], ""
            assert item["status"] == "in_progress"
            state = "part" if item["type"] == "function_call" else "item"
            continue
        if kind == "output_item.done":
            assert state == ("done" if item["type"] == "function_call" else "part done")
            assert event["item"]["id"] == item["id"]
            items.append(event["item"])
            state = "between"
            continue
        assert event["item_id"] == item["id"]
        name, _, step = kind.rpartition(".")
        if kind == "content_part.added":
            assert (state, event["part"]["text"]) == ("item", "")
            state = "part"
        elif kind == "content_part.done":
            assert (state, event["part"]["text"]) == ("done", text)
            state = "part done"
        elif step == "delta":
            assert state == "part"
            text += event["delta"]
        else:
            assert (state, step, event[PARTS[name]]) == ("part", "done", text)
            state = "done"
    assert state == "between"
    assert found[-1]["response"]["output"] == items
    return items


def test_a_response_has_all_fields(raw: httpx.Client) -> None:
    body = ask(raw, max_output_tokens=2, metadata={"a": "b"}, instructions="be", temperature=0.5, user="u")
    assert body["output"][0]["content"] == [
        {"type": "output_text", "text": "AB", "annotations": [], "logprobs": []}
    ]
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"
    assert body["usage"] == {
        "input_tokens": len("system:be;user:x;assistant:") + 1,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len("system:be;user:x;assistant:") + 3,
    }
    told = {"metadata": {"a": "b"}, "instructions": "be", "temperature": 0.5, "user": "u", "store": True}
    assert {name: body[name] for name in told} == told
    assert abs(body["created_at"] - time.time()) < 100
    assert body["id"].startswith("resp_")


@pytest.mark.parametrize(
    "fields",
    [
        {"max_output_tokens": 4},
        {"max_output_tokens": 4, "top_logprobs": 1},
        {"model": "caller"},
        {"model": "caller", "tools": [WEATHER]},
        {"model": "caller", "tools": [WEATHER], "parallel_tool_calls": False},
        {"model": "caller", "tools": [WEATHER], "tool_choice": "none"},
        {"model": "caller", "tools": [WEATHER], "include": ["message.output_text.logprobs"]},
    ],
)
def test_events_come_in_order_and_add_up_to_the_response(raw: httpx.Client, fields: JSON) -> None:
    whole = ask(raw, **fields)
    end = f"response.{whole['status']}"
    items = check_order(streamed(raw, **fields), end)

    def plain(found: list[JSON]) -> list[JSON]:
        return [{name: item[name] for name in item if name not in ("id", "call_id")} for item in found]

    assert plain(items) == plain(whole["output"])
    ITEMS.validate_python(items)


def test_the_client_streams_and_collects_a_response(client: openai.OpenAI) -> None:
    with client.responses.stream(model="caller", input="x", tools=[WEATHER]) as stream:  # type: ignore[list-item]
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds.count("response.function_call_arguments.done") == 2
    assert final.output_text == "Let me see."
    assert [json.loads(item.arguments) for item in final.output if item.type == "function_call"] == [
        {"city": "Bern"},
        {"city": "Basel"},
    ]


def test_the_client_parses_a_structured_text(client: openai.OpenAI) -> None:
    class Place(pydantic.BaseModel):
        city: str

    found = client.responses.parse(model="caller", input="x", text_format=Place)
    assert found.output_parsed == Place(city="Bern")
    assert found.text is not None
    assert found.text.format is not None
    assert found.text.format.type == "json_schema"


def test_logprobs_come_with_the_text_alone(client: openai.OpenAI) -> None:
    found = client.responses.create(model="caller", input="x", tools=[WEATHER], top_logprobs=1)  # type: ignore[list-item]
    message = found.output[0]
    assert message.type == "message"
    assert message.content[0].type == "output_text"
    tokens = message.content[0].logprobs
    assert tokens
    assert "".join(token.token for token in tokens).startswith("Let me see.")
    assert len(tokens[0].top_logprobs) == 2


def test_what_a_turn_said_and_called_goes_back_as_items(client: openai.OpenAI, raw: httpx.Client) -> None:
    first = client.responses.create(model="caller", input="x", tools=[WEATHER])  # type: ignore[list-item]
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "7"}
        for item in first.output
        if item.type == "function_call"
    ]
    for said in (first.output, [item.model_dump() for item in first.output]):
        items: Any = [{"role": "user", "content": "x"}, *said, *results]
        again = client.responses.create(model="caller", input=items)
        chained = client.responses.create(
            model="caller",
            input=results,  # type: ignore[arg-type]
            previous_response_id=first.id,
        )
        assert again.usage is not None
        assert chained.usage is not None
        assert again.usage.input_tokens == chained.usage.input_tokens


def test_a_reference_stands_for_an_item_that_is_kept(client: openai.OpenAI) -> None:
    first = client.responses.create(model="fake_llm", input="x", max_output_tokens=2)
    items: Any = [
        {"role": "user", "content": "x"},
        {"type": "item_reference", "id": first.output[0].id},
        {"role": "user", "content": "y"},
    ]
    again = client.responses.create(model="fake_llm", input=items, max_output_tokens=1)
    assert again.usage is not None
    assert again.usage.input_tokens == len("user:x;assistant:AB;user:y;assistant:") + 1
    client.responses.delete(again.id)
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="fake_llm", input=items)
    assert caught.value.param == "input[1].id"


def test_items_of_one_turn_become_one_message_for_the_template(raw: httpx.Client) -> None:
    """The fake template writes role and content of each message, so the prompt's length tells the messages."""
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "d"}]},
        {"role": "user", "content": "u"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": "a", "type": "message"},
        call,
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "r"}]},
    ]
    prompt = "system:d;user:u;assistant:a;tool:r;assistant:"
    assert ask(raw, input=items)["usage"]["input_tokens"] == len(prompt) + 1


def test_kept_responses_are_read_listed_and_deleted(client: openai.OpenAI) -> None:
    first = client.responses.create(model="fake_llm", input="one", max_output_tokens=2)
    second = client.responses.create(
        model="fake_llm", input="two", max_output_tokens=2, previous_response_id=first.id
    )
    assert client.responses.retrieve(first.id) == first
    assert second.previous_response_id == first.id
    listed = list(client.responses.input_items.list(second.id, order="asc", limit=2))
    assert [item.role for item in listed if item.type == "message"] == ["user", "assistant", "user"]
    assert [item.id for item in client.responses.input_items.list(second.id)] == [
        item.id for item in reversed(listed)
    ]
    client.responses.delete(first.id)
    for gone in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            gone(first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="fake_llm", input="x", previous_response_id=first.id)
    assert caught.value.param == "previous_response_id"
    client.responses.create(model="fake_llm", input="x", previous_response_id=second.id)


def test_a_streamed_response_is_kept_too_and_store_false_is_not(client: openai.OpenAI) -> None:
    *_, last = client.responses.create(model="fake_llm", input="x", max_output_tokens=3, stream=True)
    assert last.type == "response.incomplete"
    assert client.responses.retrieve(last.response.id) == last.response
    lost = client.responses.create(model="fake_llm", input="x", store=False, max_output_tokens=1)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(lost.id)


def test_queries_that_are_not_offered_are_refused(raw: httpx.Client) -> None:
    id = ask(raw, max_output_tokens=1)["id"]
    for query in ("stream=true", "starting_after=3"):
        assert raw.get(f"/v1/responses/{id}?{query}").status_code == 400
    for query in ("limit=0", "limit=x", "order=up", "after=nobody", "before=x"):
        assert raw.get(f"/v1/responses/{id}/input_items?{query}").status_code == 400, query
    last = raw.get(f"/v1/responses/{id}/input_items").json()["last_id"]
    assert raw.get(f"/v1/responses/{id}/input_items?after={last}").json()["data"] == []


def test_two_keys_do_not_see_each_other_s_responses(tmp_path: Path) -> None:
    with live(FakeLLMPredictor(tmp_path), api_key=["one", "two"]) as server:
        clients = [
            openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) for key in ("one", "two")
        ]
        kept = clients[0].responses.create(model="fake_llm", input="x", max_output_tokens=1)
        assert clients[0].responses.retrieve(kept.id).id == kept.id
        for refused in (clients[1].responses.retrieve, clients[1].responses.delete):
            with pytest.raises(openai.NotFoundError):
                refused(kept.id)
        with pytest.raises(openai.BadRequestError):
            clients[1].responses.create(model="fake_llm", input="x", previous_response_id=kept.id)
        assert clients[0].responses.retrieve(kept.id).id == kept.id
        for client in clients:
            client.close()


def test_a_server_that_keeps_nothing_says_so(tmp_path: Path) -> None:
    limits = ServeLimits(max_stored_bytes=0)
    with live(FakeLLMPredictor(tmp_path), limits=limits) as server, httpx.Client(base_url=server.url) as raw:
        body = ask(raw, max_output_tokens=1)
        assert body["store"] is False
        answer = raw.post("/v1/responses", json={"model": "fake_llm", "input": "x", "store": True})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "store")
        assert raw.get(f"/v1/responses/{body['id']}").status_code == 404


def test_the_store_is_bounded_in_count_over_http(tmp_path: Path) -> None:
    limits = ServeLimits(max_stored_responses=2)
    with live(FakeLLMPredictor(tmp_path), limits=limits) as server, httpx.Client(base_url=server.url) as raw:
        ids = [ask(raw, max_output_tokens=1)["id"] for _ in range(2)]
        assert raw.get(f"/v1/responses/{ids[0]}").status_code == 200, "used last"
        ids.append(ask(raw, max_output_tokens=1)["id"])
        assert [raw.get(f"/v1/responses/{id}").status_code for id in ids] == [200, 404, 200]


def kept(size: int) -> StoredResponse:
    return StoredResponse(b"", b" " * (size - OVERHEAD), 0)


def test_the_largest_tenant_loses_what_it_used_longest_ago() -> None:
    store = ResponseStore(max_bytes=10 * 2000, max_count=100)
    store.put("polite", "p", kept(2000))
    for i in range(9):
        store.put("greedy", str(i), kept(2000))
    assert store.get("greedy", "0") is not None
    for i in range(9, 40):
        store.put("greedy", str(i), kept(2000))
        assert store.bytes <= 10 * 2000
    assert store.get("polite", "p") is not None
    assert store.get("greedy", "1") is None
    assert store.get("greedy", "39") is not None
    assert (store.bytes, store.count) == (20000, 10)


def test_a_response_beyond_the_limit_is_not_kept_and_evicts_none() -> None:
    store = ResponseStore(max_bytes=5000, max_count=2)
    store.put("a", "1", kept(2000))
    store.put("a", "2", kept(5001))
    assert store.get("a", "2") is None
    assert store.get("a", "1") is not None
    store.put("b", "3", kept(2000))
    store.put("b", "4", kept(2000))
    assert store.count == 2
    assert store.remove("a", "nobody") is False
    assert [store.remove(tenant, id) for tenant, id in (("a", "1"), ("b", "3"), ("b", "4"))].count(True) == 2
    assert (store.bytes, store.count) == (0, 0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 1}, "input"),
        ({"input": []}, "input"),
        ({"input": [1]}, "input[0]"),
        ({"input": [[]]}, "input[0]"),
        ({"input": [{}]}, "input[0]"),
        ({"input": [{"id": "x"}]}, "input[0].id"),
        ({"input": [{"type": 1}]}, "input[0].type"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 1}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [1]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0]"),
        (
            {
                "input": [
                    {"role": "user", "content": "x"},
                    {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]},
                ],
                "instructions": "be",
            },
            "input[1].content[0]",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]},
            "input[0].content[0].file_id",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input[0].call_id"),
        (
            {
                "input": [
                    {"role": "assistant", "content": "x"},
                    {"type": "function_call", "call_id": "a", "name": "b", "arguments": "{"},
                ]
            },
            "input[1].arguments",
        ),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
            "input[0].encrypted_content",
        ),
        ({"input": "x" * 300}, "input"),
        ({"input": "50%"}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [{**WEATHER, "parameters": {"type": "string"}}]}, "tools[0].parameters"),
        ({"tools": [{**WEATHER, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        (
            {"tools": [WEATHER], "tool_choice": "required", "text": {"format": {"type": "json_object"}}},
            "text.format",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"colour": "red"}}, "text"),
        ({"include": ["reasoning.encrypted_content"]}, "include[0]"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"max_output_tokens": 9999}, "max_output_tokens"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"n": 2}, "n"),
        ({"stop": ["a"]}, "stop"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
        ({"model": "mute"}, "input"),
    ],
)
def test_what_is_not_done_is_refused_by_name(raw: httpx.Client, fields: JSON, param: str) -> None:
    for stream in (False, True):
        answer = raw.post(
            "/v1/responses", json={"model": "fake_llm", "input": "x", "stream": stream, **fields}
        )
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["param"] == param, error
    assert ask(raw, max_output_tokens=1)["status"] == "incomplete"


def test_a_grammar_that_cannot_be_compiled_is_422(tmp_path: Path) -> None:
    def refuse(*_: Any) -> None:
        raise UsageError("too deep")

    model = FakeLLMPredictor(tmp_path)
    assert model.language_model is not None
    model.language_model = FakeLanguageModel(
        model.language_model.engine_client, tmp_path, check_grammar=refuse
    )
    with live(model) as server, httpx.Client(base_url=server.url) as raw:
        for fields, param in (
            ({"text": {"format": {"type": "json_object"}}}, "text.format"),
            ({"tools": [WEATHER], "tool_choice": "required"}, "tools"),
        ):
            answer = raw.post("/v1/responses", json={"model": "fake_llm", "input": "x", **fields})
            assert (answer.status_code, answer.json()["error"]["param"]) == (422, param)


def test_deep_and_long_inputs_end_in_an_answer(raw: httpx.Client) -> None:
    deep = b'{"model": "fake_llm", "input": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    headers = {"content-type": "application/json"}
    assert raw.post("/v1/responses", content=deep, headers=headers).status_code == 400
    items = [{"role": "user", "content": "x"}] * 5000
    assert raw.post("/v1/responses", json={"model": "fake_llm", "input": items}).status_code == 400
    answer = raw.post("/v1/responses", json={"model": "fake_llm", "input": items[:1000]})
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_failure_in_a_stream_is_its_last_event(raw: httpx.Client) -> None:
    found = streamed(raw, input="x!")
    assert [event["type"] for event in found[-2:]] == ["response.output_text.delta", "response.failed"]
    assert found[-1]["response"]["error"]["code"] == "server_error"
    assert "boom" in found[-1]["response"]["error"]["message"]
    assert raw.post("/v1/responses", json={"model": "fake_llm", "input": "x!"}).status_code == 500


def test_a_waiting_stream_begins_and_pings_a_gone_one_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(event_stream, "PING_SECONDS", 0.02)
    engine = FakeEngine()
    engine.gate.clear()
    with live(FakeLLMPredictor(tmp_path, engine=engine)) as server, httpx.Client(base_url=server.url) as raw:
        body = {"model": "fake_llm", "input": "x", "stream": True}
        with raw.stream("POST", "/v1/responses", json=body) as answer:
            texts = answer.iter_text()
            assert next(texts).startswith("event: response.created\n")
            assert next(texts) == ": ping\n\n"
        deadline = time.monotonic() + 10
        while not engine.cancelled and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(engine.cancelled) == 1
        engine.gate.set()


def test_an_effort_goes_to_a_template_that_knows_it(tmp_path: Path) -> None:
    template = TEMPLATE + "{% if enable_thinking %}{{ reasoning_effort }}{% endif %}"
    with (
        live(FakeLLMPredictor(tmp_path, template=template)) as server,
        httpx.Client(base_url=server.url) as raw,
    ):
        sizes = [
            ask(raw, max_output_tokens=1, reasoning=reasoning)["usage"]["input_tokens"]
            for reasoning in (None, {"effort": "none"}, {"effort": "high"})
        ]
    assert [size - sizes[0] for size in sizes] == [0, 0, len("high")]


def test_reasoning_is_an_item_of_its_own_before_the_message() -> None:
    reply: Any = thought_then_called()
    response = ResponseObject(
        id="resp_1", created_at=0, instructions=None, max_output_tokens=None, max_tool_calls=None, model="m",
        parallel_tool_calls=True, previous_response_id=None, prompt_cache_key=None, reasoning=Reasoning(),
        safety_identifier=None, store=False, temperature=1.0, text=TextConfig(), tool_choice="auto", tools=[],
        top_logprobs=0, top_p=1.0, user=None, metadata={},
    )  # fmt: skip
    writer = ResponseWriter(reply, response, lambda _: None)
    outputs: Any = [None]
    body = writer.begin() + b"".join(writer.events(outputs) for _ in range(4)) + writer.end()
    items = check_order(events(body.decode()))
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "Let me think"}]
    assert items[1]["content"][0]["text"] == "\n\nYes.\n"
    assert (items[2]["call_id"], items[2]["arguments"]) == ("c", "{}")
