"""The /v1 text routes against a server with a fake model: fields, streams, errors, tools."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from infer.serve.api.openai.chat_types import ChatChunk
from infer.serve.api.openai.openai_types import Completion
from tests.support.fake_llm import FakeEngine, FakeLLMPredictor
from tests.support.fake_predictors import Live, double, live

JSON = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fake_llm")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Live]:
    with live(FakeLLMPredictor(folder), FakeLLMPredictor(folder, "mute", template=None), double()) as server:
        yield server


def ask(raw: httpx.Client, **fields: Any) -> JSON:
    answer = raw.post("/v1/completions", json={"model": "fake_llm", **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(answer: httpx.Response) -> list[JSON]:
    """Of a stream that ended well."""
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_models_report_task_and_context_length(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["fake_llm", "mute", "double"]
    described = client.models.retrieve("fake_llm").model_dump()
    assert (described["task"], described["max_model_len"]) == ("text-generation", 64)
    assert client.models.retrieve("double").model_dump()["max_model_len"] is None


def test_completion_response_has_all_fields(raw: httpx.Client) -> None:
    answer = raw.post("/v1/completions", json={"model": "fake_llm", "prompt": "hi", "max_tokens": 3})
    body = answer.json()
    assert body["choices"] == [
        {"index": 0, "text": "ABC", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert body["object"] == "text_completion"
    assert re.fullmatch("infer-[0-9a-f]{12}", body["system_fingerprint"])
    assert abs(body["created"] - time.time()) < 100
    assert re.fullmatch("cmpl-[0-9a-f]{24}", body["id"])
    assert answer.headers["x-infer-queue"] == "0" if "x-infer-queue" in answer.headers else True
    assert len(answer.headers["x-request-id"]) == 32


def test_chat_response_has_all_fields(raw: httpx.Client) -> None:
    body = {"model": "fake_llm", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    answer = raw.post("/v1/chat/completions", json=body).json()
    message = {"role": "assistant", "content": "AB", "refusal": None, "annotations": []}
    assert answer["choices"] == [
        {"index": 0, "message": message, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert answer["usage"]["prompt_tokens"] == len("user:hi;assistant:") + 1
    assert answer["object"] == "chat.completion"


@pytest.mark.parametrize(
    ("prompt", "texts", "tokens"),
    [
        ("hi", ["AB"], 3),
        (["hi", "you"], ["AB", "AB"], 7),
        ([104, 105], ["AB"], 2),
        ([[104, 105], [1]], ["AB", "AB"], 3),
    ],
)
def test_prompts_may_be_texts_or_token_ids_one_or_many(
    raw: httpx.Client, prompt: Any, texts: list[str], tokens: int
) -> None:
    answer = ask(raw, prompt=prompt, max_tokens=2)
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))
    assert answer["usage"]["prompt_tokens"] == tokens


def test_n_completions_are_grouped_by_prompt(raw: httpx.Client) -> None:
    answer = ask(raw, prompt=["x", "y"], n=3, max_tokens=2)
    assert [choice["text"] for choice in answer["choices"]] == ["AB", "BC", "CD"] * 2
    assert answer["usage"]["completion_tokens"] == 12


def test_default_max_tokens_is_16_for_completions_context_for_chat(raw: httpx.Client) -> None:
    assert ask(raw, prompt="x")["choices"][0]["text"] == "ABCDEFGHIJKLMNOP"
    body = {"model": "fake_llm", "messages": [{"role": "user", "content": "x"}]}
    usage = raw.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["total_tokens"] == 64
    assert ask(raw, prompt="x" * 60)["usage"]["total_tokens"] == 64


def test_completion_logprobs_are_parallel_lists(raw: httpx.Client) -> None:
    lists = ask(raw, prompt="x", max_tokens=2, logprobs=1)["choices"][0]["logprobs"]
    assert lists == {
        "tokens": ["A", "B"],
        "token_logprobs": [-0.65, -0.66],
        "top_logprobs": [{"A": -0.65, "\0": -9.0}, {"B": -0.66, "\0": -9.0}],
        "text_offset": [0, 1],
    }


def test_echo_includes_prompt_logprobs_except_the_first_token(raw: httpx.Client) -> None:
    choice = ask(raw, prompt=[104, 195, 188], max_tokens=1, logprobs=1, echo=True)["choices"][0]
    assert choice["text"] == "hüA"
    assert choice["logprobs"]["tokens"] == ["h", "bytes:\\xc3", "bytes:\\xbc", "A"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.95, -1.88, -0.65]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"][0] == 0


def test_echo_works_with_max_tokens_0(raw: httpx.Client) -> None:
    answer = ask(raw, prompt="hi", max_tokens=0, echo=True, logprobs=0)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hi", "length")
    assert choice["logprobs"]["tokens"] == ["<s>", "h", "i"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1]
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", ["\U0001f600 \u00fc", "a\u4e2d", [104, 0xF0, 0x9F, 0x98]])
def test_offsets_count_characters_of_several_tokens_once(
    tmp_path: Path, prompt: str | list[int], echo: bool
) -> None:
    said = "\u00e9\U0001f600x\u20ac\U0001f600"
    engine = FakeEngine(script=said)
    with live(FakeLLMPredictor(tmp_path, engine=engine)) as server, httpx.Client(base_url=server.url) as raw:
        body = {"model": "fake_llm", "prompt": prompt, "logprobs": 1, "echo": echo}
        whole = raw.post("/v1/completions", json=body).json()["choices"][0]
        found = events(raw.post("/v1/completions", json={**body, "stream": True}))
    lists = [choice["logprobs"] for event in found for choice in event["choices"] if choice["logprobs"]]
    offsets = whole["logprobs"]["text_offset"]
    assert [offset for one in lists for offset in one["text_offset"]] == offsets
    assert len(offsets) == len(whole["logprobs"]["tokens"])
    text = whole["text"]
    given = text.removesuffix(said)
    own = offsets[-len(said.encode()) :]
    if isinstance(prompt, str):
        assert own == [len(given) + i for i, one in enumerate(said) for _ in one.encode()]
        assert offsets[: -len(own)] == (
            [0, *(i for i, one in enumerate(prompt) for _ in one.encode())] if echo else []
        )
    elif echo:
        assert offsets[: -len(own)] == [0, 1, 1, 1]


def test_chat_logprobs_are_objects(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake_llm",
        messages=[{"role": "user", "content": "x"}],
        max_completion_tokens=1,
        logprobs=True,
        top_logprobs=2,
    )
    assert answer.choices[0].logprobs is not None
    (one,) = answer.choices[0].logprobs.content or []
    assert (one.token, one.logprob, one.bytes) == ("A", -0.65, [65])
    assert [(top.token, top.logprob) for top in one.top_logprobs] == [("A", -0.65), ("\0", -9.0)]


def test_streamed_completion_equals_full_completion(client: openai.OpenAI) -> None:
    ask: JSON = {
        "model": "fake_llm",
        "prompt": ["x", "y"],
        "n": 2,
        "max_tokens": 5,
        "logprobs": 1,
        "echo": True,
    }
    whole = client.completions.create(**ask)
    stream = client.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    texts, tokens, finish = [""] * 4, [list[str]() for _ in range(4)], [""] * 4
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.logprobs:
                tokens[choice.index] += choice.logprobs.tokens or []
            finish[choice.index] = choice.finish_reason or ""
        usage = chunk.usage
    assert texts == [choice.text for choice in whole.choices]
    assert finish == [choice.finish_reason for choice in whole.choices]
    assert tokens[0] == (whole.choices[0].logprobs.tokens if whole.choices[0].logprobs else None)
    assert usage == whole.usage


def test_streamed_chat_equals_full_chat(client: openai.OpenAI) -> None:
    ask: JSON = {"model": "fake_llm", "messages": [{"role": "user", "content": "x"}], "n": 2, "max_tokens": 4}
    whole = client.chat.completions.create(**ask)
    texts, roles, finish = ["", ""], list[Any](), ["", ""]
    for chunk in client.chat.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles += [choice.delta.role] if choice.delta.role else []
            finish[choice.index] = choice.finish_reason or finish[choice.index]
        assert chunk.usage is None
    assert texts == [choice.message.content for choice in whole.choices]
    assert roles == ["assistant", "assistant"]
    assert finish == ["length", "length"]


@pytest.mark.parametrize("usage", [None, {"include_usage": True}, {"continuous_usage_stats": True}])
@pytest.mark.parametrize("chat", [False, True])
def test_every_event_matches_its_openapi_schema(raw: httpx.Client, chat: bool, usage: JSON | None) -> None:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    what = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    logprobs: JSON = {"logprobs": True, "top_logprobs": 1} if chat else {"logprobs": 1}
    body = {"model": "fake_llm", "max_tokens": 3, "stream": True, "stream_options": usage, **what, **logprobs}
    answer = raw.post(path, json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    found = events(answer)
    for event in found:
        typed = msgspec.convert(event, ChatChunk if chat else Completion)
        assert msgspec.to_builtins(typed) == event
        assert ("usage" in event) == (usage is not None)
    assert len({event["id"] for event in found}) == 1
    if usage == {"include_usage": True}:
        assert found[-1]["choices"] == []
        assert found[-1]["usage"]["completion_tokens"] == 3
        assert found[0]["usage"] is None
    elif usage:
        assert [event["usage"]["completion_tokens"] for event in found][-1] == 3


def test_events_of_one_step_are_one_write(raw: httpx.Client) -> None:
    with raw.stream(
        "POST", "/v1/completions", json={"model": "fake_llm", "prompt": "x", "stream": True}
    ) as answer:
        text = "".join(answer.iter_text())
    assert len(events(httpx.Response(200, text=text))) == 16


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, None),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [-1]}, None),
        ({"prompt": [258]}, "prompt"),
        ({"prompt": [[1], [258]]}, "prompt[1]"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 63}, "max_tokens"),
        ({"prompt": "a" * 64}, "prompt"),
        ({"prompt": "a" * 100_000}, "prompt"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 17}, "n"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "top_p": 1.1}, "top_p"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "stop": ["a"] * 17}, "stop"),
        ({"prompt": "a", "logit_bias": {"258": 1}}, None),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"1": 101}}, None),
        ({"prompt": "a", "presence_penalty": 3}, "presence_penalty"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "timeout": 0}, "timeout"),
        ({"prompt": "a", "stream": "yes"}, "stream"),
        ({"prompt": "50%"}, "prompt"),
    ],
)
def test_unsupported_requests_return_400_naming_the_field(
    raw: httpx.Client, fields: JSON, param: str | None
) -> None:
    for stream in (False, True):
        body = {"model": "fake_llm", "stream": stream, **fields}
        if fields == {"prompt": ""}:
            body["add_special_tokens"] = False
        answer = raw.post("/v1/completions", json=body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        if param is not None:
            assert error["param"] == param
    assert ask(raw, prompt="a", max_tokens=1)["choices"][0]["text"] == "A"


def test_context_overflow_has_openai_error_code(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="context is 64 tokens") as caught:
        client.completions.create(model="fake_llm", prompt="x" * 10, max_tokens=60)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            None,
        ),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs.chat_template"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ],
)
def test_invalid_chats_return_400(raw: httpx.Client, fields: JSON, param: str | None) -> None:
    body = {"model": "fake_llm", "messages": [{"role": "user", "content": "x"}], **fields}
    answer = raw.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    if param is not None:
        assert answer.json()["error"]["param"] == param


def test_chat_needs_a_template_and_a_language_model(raw: httpx.Client) -> None:
    body: JSON = {"model": "mute", "messages": [{"role": "user", "content": "x"}]}
    answer = raw.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "no chat template" in answer.json()["error"]["message"]
    assert raw.post("/v1/completions", json={"model": "mute", "prompt": "x"}).status_code == 200
    answer = raw.post("/v1/completions", json={"model": "double", "prompt": "x"})
    assert answer.status_code == 400
    assert "generates no text" in answer.json()["error"]["message"]


def test_language_model_refuses_embeddings_and_tensors(raw: httpx.Client) -> None:
    answer = raw.post("/v1/embeddings", json={"model": "fake_llm", "input": "x"})
    assert answer.status_code == 400
    assert "makes no embeddings" in answer.json()["error"]["message"]
    answer = raw.post("/v2/models/fake_llm/infer", json={"inputs": []})
    assert answer.status_code == 404
    assert "/v1/completions" in answer.json()["error"]
    assert raw.get("/v2/models").json()["models"][0]["name"] == "double"


def test_unknown_model_returns_404_wrong_media_415(raw: httpx.Client) -> None:
    for path, body in (
        ("completions", {"prompt": "x"}),
        ("chat/completions", {"messages": [{"role": "user"}]}),
    ):
        answer = raw.post(f"/v1/{path}", json={"model": "gpt-4", **body})
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"
        headers = {"content-type": "text/plain"}
        assert raw.post(f"/v1/{path}", content=b"{}", headers=headers).status_code == 415


def test_nulls_are_accepted_and_unknown_fields_counted(raw: httpx.Client) -> None:
    def counted() -> float:
        found = re.search(r'infer_unknown_fields_total\{model="fake_llm".*\} (\S+)', raw.get("/metrics").text)
        return float(found[1]) if found else 0.0

    before = counted()
    nulls = dict.fromkeys(
        ("stop", "max_tokens", "seed", "logprobs", "n", "stream_options", "logit_bias", "user")
    )
    ask(raw, prompt="x", **nulls, use_beam_search=False, surprise={"a": [1]})
    assert counted() == before + 2


REFUSED = [
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"grammar": 'root ::= "a"'}, "grammar"),
    ({"ebnf": "a"}, "ebnf"),
    ({"regex": "a"}, "regex"),
    ({"json_schema": {"type": "object"}}, "json_schema"),
    ({"structural_tag": "{}"}, "structural_tag"),
    ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs"),
    ({"guided_grammar": 'root ::= "a"', "guided_regex": "a"}, "guided_grammar"),
    ({"structured_outputs": {"structural_tag": "b"}}, "structured_outputs.structural_tag"),
    (
        {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
    ),
    ({"response_format": {"type": "json_object", "strictly": True}}, "response_format.strictly"),
    ({"allowed_token_ids": [1 << 30]}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": ["a"] * 65}, "bad_words"),
    ({"bad_words": ["a" * 129]}, "bad_words[0]"),
    ({"bad_words_ids": [[5]]}, "bad_words_ids"),
    ({"logits_processors": ["x"]}, "logits_processors"),
    ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"length_penalty": 0.5}, "length_penalty"),
    ({"early_stopping": True}, "early_stopping"),
    ({"best_of": 2}, "best_of"),
    ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"typical_p": 0.5}, "typical_p"),
    ({"mirostat": 1}, "mirostat"),
    ({"do_sample": False}, "do_sample"),
    ({"repeat_penalty": 1.1}, "repeat_penalty"),
    ({"n_predict": 3}, "n_predict"),
    ({"stop_sequences": ["A"]}, "stop_sequences"),
    ({"options": {"temperature": 0}}, "options"),
    ({"documents": [{"text": "a"}]}, "documents"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"modalities": ["text", "audio"]}, "modalities"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[param for _, param in REFUSED])
def test_fields_that_shape_the_output_are_done_or_refused(
    raw: httpx.Client, fields: JSON, param: str
) -> None:
    for path, prompt in (
        ("completions", {"prompt": "x"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        answer = raw.post(f"/v1/{path}", json={"model": "fake_llm", **prompt, **fields})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param


def test_values_that_ask_for_nothing_are_accepted(raw: httpx.Client) -> None:
    empty: list[Any] = [None, False, [], "", {}]
    for value in empty:
        ask(raw, prompt="x", bad_words_ids=value, use_beam_search=value, grammar=value)
    for value in (None, []):
        ask(raw, prompt="x", bad_words=value, allowed_token_ids=value)
    ask(raw, prompt="x", best_of=1, length_penalty=1.0, typical_p=1, mirostat=0, add_generation_prompt=True)
    ask(raw, prompt="x", n_predict=-1, do_sample=True, modalities=["text"], function_call="none")
    idle = {"grammar": None, "structural_tag": None, "disable_fallback": False, "whitespace_pattern": None}
    ask(raw, prompt="x", structured_outputs={"choice": ["a"], **idle})
    ask(raw, prompt="x", guided_json=None, guided_regex=None, guided_choice=[], guided_grammar="")


def test_message_parts_are_joined_and_developer_maps_to_system(server: Live, raw: httpx.Client) -> None:
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "d"}, {"role": "user", "content": content}]
    answer = raw.post("/tokenize", json={"model": "fake_llm", "messages": messages})
    text = raw.post("/detokenize", json={"model": "fake_llm", "tokens": answer.json()["tokens"]}).json()[
        "prompt"
    ]
    assert text == "<s>system:d;user:a\nb;assistant:"


def test_tokenize_and_detokenize_round_trip(raw: httpx.Client) -> None:
    body: JSON = {"model": "fake_llm", "prompt": "hü", "return_token_strs": True}
    answer = raw.post("/tokenize", json=body).json()
    assert answer["tokens"] == [256, 104, 195, 188]
    assert (answer["count"], answer["max_model_len"]) == (4, 64)
    assert answer["token_strs"][:2] == ["<s>", "h"]
    plain = raw.post("/tokenize", json={**body, "add_special_tokens": False}).json()["tokens"]
    assert plain == [104, 195, 188]
    assert raw.post("/detokenize", json={"model": "fake_llm", "tokens": plain}).json() == {"prompt": "hü"}
    assert raw.post("/detokenize", json={"model": "fake_llm", "tokens": [258]}).status_code == 400
    assert raw.post("/tokenize", json={"model": "fake_llm"}).status_code == 400
    assert raw.post("/tokenize", json={"prompt": "x"}).json()["error"]["param"] == "model"
    assert raw.get("/tokenizer_info").status_code == 400


def test_model_field_is_optional_with_one_language_model(tmp_path: Path) -> None:
    with live(FakeLLMPredictor(tmp_path), double()) as server, httpx.Client(base_url=server.url) as raw:
        assert raw.post("/tokenize", json={"prompt": "x"}).json()["count"] == 2
        info = raw.get("/tokenizer_info").json()
        assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<s>", "</s>", None)
        assert "m.role" in info["chat_template"]
    with live(double()) as server, httpx.Client(base_url=server.url) as raw:
        assert raw.get("/tokenizer_info").status_code == 404


def test_mid_stream_error_is_an_event_that_the_client_raises(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="fake_llm", prompt="x!", stream=True)
    assert next(stream).choices[0].text == "A"
    with pytest.raises(openai.APIError, match="boom"):
        next(stream)
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model="fake_llm", prompt="x!")


def test_metrics_count_tokens_and_latencies(raw: httpx.Client) -> None:
    ask(raw, prompt="x", max_tokens=4)
    text = raw.get("/metrics").text
    label = '{model="fake_llm",version="1"}'
    for name in (
        *("infer_time_to_first_token_seconds_count", "infer_inter_token_seconds_count"),
        *("infer_prompt_tokens_total", "infer_generation_tokens_total", "infer_kv_cache_usage_ratio"),
        *("infer_prefix_cache_queries_total", "infer_prefix_cache_hits_total", "infer_preemptions_total"),
        "infer_prefix_cache_evictions_total",
        *("infer_requests_running", "infer_requests_waiting", "infer_engine_heartbeat_age_seconds"),
    ):
        assert f"{name}{label}" in text, name
    assert 'infer_completions_total{model="fake_llm",reason="length",version="1"}' in text


def test_openapi_describes_streams(raw: httpx.Client) -> None:
    document = raw.get("/openapi.json").json()
    for path, name in (("/v1/completions", "Completion"), ("/v1/chat/completions", "ChatChunk")):
        operation = document["paths"][path]["post"]
        content = operation["responses"]["200"]["content"]
        assert content["text/event-stream"]["schema"] == {"$ref": f"#/components/schemas/{name}"}
        assert "application/json" in content
        assert {"400", "404", "413", "415", "422", "429", "503", "504"} <= set(operation["responses"])


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALLS = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Basel"}}\n</tool_call>'
)


@pytest.mark.parametrize(
    "choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_tool_calls_are_parsed_in_full_and_streamed(choice: Any, tmp_path: Path) -> None:
    fake_llm = FakeLLMPredictor(tmp_path, engine=FakeEngine(script=f"Let me see.\n{CALLS}"))
    with (
        live(fake_llm) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        ask: JSON = {"model": "fake_llm", "messages": [{"role": "user", "content": "x"}]}
        ask |= {"tools": [WEATHER], "tool_choice": choice, "logprobs": True, "max_tokens": 9}
        choice = client.chat.completions.create(**ask).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        calls = choice.message.tool_calls
        assert [json.loads(c.function.arguments)["city"] for c in calls] == ["Bern", "Basel"]
        assert {c.function.name for c in calls} == {"get_weather"}
        content, named, arguments, finish, tokens = "", dict[int, Any](), dict[int, str](), None, 0
        for chunk in client.chat.completions.create(**ask, stream=True):
            (part,) = chunk.choices
            content += part.delta.content or ""
            finish = part.finish_reason or finish
            tokens += len(part.logprobs.content or []) if part.logprobs else 0
            for call in part.delta.tool_calls or []:
                if call.id:
                    named[call.index] = (call.type, call.function.name)
                arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
        assert (content, finish) == ("Let me see.", "tool_calls")
        assert named == dict.fromkeys((0, 1), ("function", "get_weather"))
        assert arguments == {i: c.function.arguments for i, c in enumerate(calls)}
        assert tokens == len(choice.logprobs.content) == len(f"Let me see.\n{CALLS}")


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_tool_calls_the_first_call_stands(tmp_path: Path, stream: bool) -> None:
    with live(FakeLLMPredictor(tmp_path, engine=FakeEngine(script=CALLS))) as server:
        body = {"model": "fake_llm", "messages": [{"role": "user", "content": "x"}], "tools": [WEATHER]}
        url = f"{server.url}/v1/chat/completions"
        answer = httpx.post(url, json={**body, "parallel_tool_calls": False, "stream": stream})
        if stream:
            parts = [choice["delta"] for event in events(answer) for choice in event["choices"]]
            calls = [call for part in parts for call in part.get("tool_calls", [])]
        else:
            calls = answer.json()["choices"][0]["message"]["tool_calls"]
        assert {call.get("index", 0) for call in calls} == {0}
        assert len([call for call in calls if call.get("id")]) == 1


def test_tool_choice_none_leaves_call_syntax_as_text(tmp_path: Path) -> None:
    with live(FakeLLMPredictor(tmp_path, engine=FakeEngine(script=CALLS))) as server:
        body = {"model": "fake_llm", "messages": [{"role": "user", "content": "x"}], "tools": [WEATHER]}
        url = f"{server.url}/v1/chat/completions"
        choice = httpx.post(url, json={**body, "tool_choice": "none"}).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALLS, "stop")
        assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"tools": [{**WEATHER, "type": "web"}]}, 400, "tools[0].type"),
        ({"tools": [WEATHER, WEATHER]}, 400, "tools[1].function.name"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            400,
            "tool_choice",
        ),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        (
            {"tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}},
            400,
            "response_format",
        ),
        ({"structured_outputs": {"regex": "("}}, 422, "structured_outputs"),
        ({"guided_regex": "("}, 422, "guided_regex"),
        ({"guided_json": "{"}, 400, "guided_json"),
        ({"guided_json": "[]"}, 400, "guided_json"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, 400, "guided_choice"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, 400, "guided_regex"),
        ({"guided_regex": "a", "tools": [WEATHER], "tool_choice": "required"}, 400, "response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, 400, "structured_outputs"),
        ({"structured_outputs": {"json_object": True, "choice": ["b"]}}, 400, "structured_outputs"),
        ({"response_format": {"type": "text", "schema": {}}}, 400, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}, "schema": {}}},
            400,
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, 400, None),
    ],
)
def test_inconsistent_tools_and_formats_are_refused(
    raw: httpx.Client, fields: JSON, status: int, param: str | None
) -> None:
    body = {"model": "fake_llm", "messages": [{"role": "user", "content": "x"}], **fields}
    answer = raw.post("/v1/chat/completions", json=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    if param is not None:
        assert answer.json()["error"]["param"] == param
