"""A trained language model over HTTP with the openai client: outputs equal the Predictor's."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

pytest.importorskip("transformers")

from infer import Predictor
from tests.support.fake_predictors import Live, live

pytestmark = pytest.mark.filterwarnings("ignore")  # the exporter has many to give
PROMPT = "The json module"
JSON = dict[str, Any]


@pytest.fixture(scope="module")
def predictor(pydoc_artifact: Path) -> Iterator[Predictor]:
    """pydoc_lm, its cache large enough for about ten sequences."""
    with Predictor.load(pydoc_artifact, kv_memory="40MiB") as predictor:
        yield predictor


@pytest.fixture(scope="module")
def server(predictor: Predictor) -> Iterator[Live]:
    with live(predictor) as server:
        yield server


@pytest.fixture(scope="module")
def model(predictor: Predictor) -> str:
    return predictor.name


def settled(predictor: Predictor, seconds: float = 10) -> bool:
    """Return True once nothing runs and every page is free or only cached as a prefix."""
    deadline = time.monotonic() + seconds
    while predictor.engine_client.running and time.monotonic() < deadline:
        time.sleep(0.01)
    predictor.language_model.engine.check_integrity()
    stats = predictor.engine_client.stats()
    return (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)


def wait_until(met: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.002)


def test_greedy_completion_equals_the_predictor(
    predictor: Predictor, client: openai.OpenAI, model: str
) -> None:
    made = predictor.generate(PROMPT, max_tokens=20, temperature=0)
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=20, temperature=0)
    assert answer.choices[0].text == made.text
    assert answer.choices[0].finish_reason == made.finish_reason
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == made.prompt_tokens
    ids = predictor.language_model.encode(PROMPT)
    again = client.completions.create(model=model, prompt=[ids, ids], max_tokens=20, temperature=0)
    assert [choice.text for choice in again.choices] == [made.text] * 2


def test_greedy_chat_full_and_streamed_equals_the_predictor(
    predictor: Predictor, client: openai.OpenAI, model: str
) -> None:
    messages: Any = [{"role": "user", "content": PROMPT}]
    ask: JSON = {"model": model, "messages": messages, "max_tokens": 20, "temperature": 0}
    made = predictor.chat(messages, max_tokens=20, temperature=0)
    answer = client.chat.completions.create(**ask).choices[0]
    assert (answer.message.content, answer.finish_reason) == (made.text, made.finish_reason)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == made.text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(made.token_ids)


def test_sampling_is_reproducible_by_seed(client: openai.OpenAI, model: str) -> None:
    ask: JSON = {"model": model, "prompt": PROMPT, "max_tokens": 12, "n": 2, "temperature": 1.0}
    first, again, other = (
        [choice.text for choice in client.completions.create(**ask, seed=seed).choices] for seed in (5, 5, 6)
    )
    assert first == again
    assert first != other
    assert first[0] != first[1]


def test_stop_strings_end_and_are_excluded_from_the_text(client: openai.OpenAI, model: str) -> None:
    ask: JSON = {"model": model, "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    whole = client.completions.create(**ask).choices[0].text
    stop = whole[len(whole) // 2 :][:4]
    cut = whole[: whole.index(stop)]
    answer = client.completions.create(**ask, stop=[stop]).choices[0]
    assert (answer.text, answer.finish_reason) == (cut, "stop")
    assert answer.model_dump()["stop_reason"] == stop
    streamed = client.completions.create(**ask, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == cut
    kept = client.completions.create(**ask, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].text == cut + stop


def test_echo_logprobs_of_token_ids_equal_the_predictor(
    predictor: Predictor, client: openai.OpenAI, model: str
) -> None:
    texts = ["Return a copy of the list.", "The json module"]
    rows = [predictor.language_model.encode(text) for text in texts]
    answer = client.completions.create(
        model=model, prompt=rows, max_tokens=1, echo=True, logprobs=1, temperature=0, seed=1234
    )
    for row, choice, score in zip(rows, answer.choices, predictor.score(rows), strict=True):
        lists = choice.logprobs
        assert lists is not None
        assert lists.token_logprobs is not None
        assert len(lists.tokens or []) == len(row) + 1
        assert lists.token_logprobs[0] is None
        for got, known in zip(lists.token_logprobs[1:-1], score.logprobs[1:], strict=True):
            assert math.isclose(got, known, abs_tol=1e-4)
        for value, top in zip(lists.token_logprobs[1:], (lists.top_logprobs or [])[1:], strict=True):
            assert max(top.values()) >= value
        joined = choice.text
        for token, offset in zip(lists.tokens or [], lists.text_offset or [], strict=True):
            if not token.startswith(("bytes:", "<|")):
                assert joined[offset : offset + len(token)] == token


def test_logprobs_of_both_routes_equal_the_predictor(
    predictor: Predictor, client: openai.OpenAI, model: str
) -> None:
    made = predictor.generate(PROMPT, max_tokens=6, temperature=0, logprobs=2)
    plain = client.completions.create(model=model, prompt=PROMPT, max_tokens=6, temperature=0, logprobs=2)
    lists = plain.choices[0].logprobs
    assert lists is not None
    assert lists.token_logprobs == pytest.approx([one.logprob for one in made.logprobs], abs=1e-4)
    assert [len(top) for top in lists.top_logprobs or []] == [2] * 6
    messages: Any = [{"role": "user", "content": PROMPT}]
    chat = client.chat.completions.create(
        model=model, messages=messages, max_tokens=6, temperature=0, logprobs=True, top_logprobs=2
    )
    content = chat.choices[0].logprobs.content if chat.choices[0].logprobs else None
    assert content is not None
    assert b"".join(bytes(one.bytes or []) for one in content).decode() == chat.choices[0].message.content
    assert all(one.logprob == one.top_logprobs[0].logprob for one in content)


def test_tokenize_count_equals_prompt_tokens(predictor: Predictor, server: Live) -> None:
    with httpx.Client(base_url=server.url) as raw:
        ids = raw.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
        assert ids == predictor.language_model.encode(PROMPT)
        assert PROMPT in raw.post("/detokenize", json={"tokens": ids}).json()["prompt"]
        info = raw.get("/tokenizer_info").json()
        assert (info["bos_token"], info["eos_token"]) == ("<|begin|>", "<|end|>")
        assert "messages" in info["chat_template"]


def test_repeated_prefix_is_a_cache_hit(predictor: Predictor, client: openai.OpenAI, model: str) -> None:
    prompt = [7 + i % 100 for i in range(200)]
    first, second = (client.completions.create(model=model, prompt=prompt, max_tokens=1) for _ in range(2))
    assert first.usage is not None
    assert second.usage is not None
    cached = [
        (u.prompt_tokens_details.cached_tokens if u.prompt_tokens_details else 0)
        for u in (first.usage, second.usage)
    ]
    assert cached[0] == 0
    assert cached[1] >= 150


def test_output_follows_json_schema_and_choices(client: openai.OpenAI, model: str) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["json", "csv"]}, "count": {"type": "integer", "maximum": 99}},
        "required": ["name", "count"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    messages: Any = [{"role": "user", "content": PROMPT}]
    for stream in (False, True):
        answer: Any = client.chat.completions.create(
            model=model, messages=messages, response_format=form, seed=1, stream=stream
        )
        text = (
            "".join(chunk.choices[0].delta.content or "" for chunk in answer)
            if stream
            else answer.choices[0].message.content
        )
        assert json.loads(text)["name"] in ("json", "csv")
    schema = {"enum": ["yes", "no"]}
    for constraint in (
        {"structured_outputs": {"choice": ["yes", "no"], "grammar": None, "disable_fallback": False}},
        {"guided_choice": ["yes", "no"]},
        {"guided_regex": "yes|no"},
        {"guided_json": schema},
        {"guided_json": json.dumps(schema)},
        {"response_format": {"type": "json_object", "schema": schema}},
    ):
        chosen = client.completions.create(model=model, prompt=PROMPT, seed=1, extra_body=constraint)
        assert chosen.choices[0].text.strip('"') in ("yes", "no"), constraint
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        client.chat.completions.create(
            model=model,
            messages=messages,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "nothing"}},
            },
        )
    assert caught.value.param == "response_format"


def test_required_tool_call_matches_its_schema(client: openai.OpenAI, model: str) -> None:
    tools: Any = [
        {
            "type": "function",
            "function": {
                "name": "look_up",
                "parameters": {
                    "type": "object",
                    "properties": {"page": {"type": "integer", "maximum": 999}},
                    "required": ["page"],
                    "additionalProperties": False,
                },
            },
        }
    ]
    ask: JSON = {"model": model, "messages": [{"role": "user", "content": PROMPT}], "tools": tools, "seed": 1}
    ask |= {"tool_choice": "required", "parallel_tool_calls": False}
    choice = client.chat.completions.create(**ask).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert isinstance(json.loads(call.function.arguments)["page"], int)
    arguments = ""
    for chunk in client.chat.completions.create(**ask, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or []:
            arguments += (piece.function.arguments or "") if piece.function else ""
    assert arguments == call.function.arguments


def test_pages_of_disconnected_clients_are_freed_at_once(
    predictor: Predictor, server: Live, model: str
) -> None:
    def cancelled() -> float:
        text = httpx.get(f"{server.url}/metrics").text
        found = re.findall(r'infer_cancelled_total\{model="pydoc",.*\} (\S+)', text)
        return sum(map(float, found))

    async def ask(http: httpx.AsyncClient, index: int) -> str:
        body = {
            "model": model,
            "prompt": [index + 3] * 40,
            "max_tokens": 60,
            "ignore_eos": True,
            "stream": True,
        }
        body |= {"temperature": 0}
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            text, events = "", 0
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    events += 1
                if index % 2 and events == 3:
                    return "gone"
            assert line == "" or line == "data: [DONE]"
            return text

    async def storm() -> list[str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            return await asyncio.gather(*(ask(http, index) for index in range(16)))

    assert settled(predictor)
    before = cancelled()
    texts = asyncio.run(storm())
    assert settled(predictor)
    assert texts[1::2] == ["gone"] * 8
    assert cancelled() == before + 8
    expected = predictor.generate(
        [[i + 3] * 40 for i in range(0, 16, 2)], max_tokens=60, ignore_eos=True, temperature=0
    )
    assert texts[::2] == [made.text for made in expected]


def test_context_overflow_of_a_trained_model_has_openai_code(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt=[5] * 500, max_tokens=100)
    assert caught.value.code == "context_length_exceeded"
    assert client.completions.create(model=model, prompt=[5] * 500, max_tokens=12).usage is not None


def test_engine_metrics_are_exported(server: Live, model: str) -> None:
    text = httpx.get(f"{server.url}/metrics").text
    for name in (
        "kv_cache_usage_ratio",
        "prefix_cache_hits_total",
        "engine_steps_total",
        "prefill_tokens_total",
    ):
        assert re.search(rf'^infer_{name}\{{model="{model}",version="1"\}} ', text, re.MULTILINE), name
    assert re.search(
        rf'^infer_engine_seconds_total\{{model="{model}",phase="step",.*\}} ', text, re.MULTILINE
    )
