"""The official openai client against a live server, with valid and invalid requests."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from infer.serve.limits import ServeLimits
from tests.support.fake_predictors import Live, double, embedder, live

TEXTS = ["one", "a somewhat longer text", "", "three"][:2] + ["ünï ☃", "x" * 100]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(embedder(), double(), limits=ServeLimits(max_queue_rows=64)) as server:
        yield server


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["embedder", "double"]
    assert client.models.retrieve("embedder").object == "model"


def test_embeddings_match_the_predictor_in_base64_and_float(client: openai.OpenAI) -> None:
    expected = embedder().embed(TEXTS)
    for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        answer = client.embeddings.create(model="embedder", input=TEXTS, **options)  # type: ignore[arg-type]
        values = [one.embedding for one in answer.data]
        if options.get("encoding_format") == "base64":
            values = [np.frombuffer(base64.b64decode(v), "<f4").tolist() for v in values]  # type: ignore[arg-type]
        assert np.array(values).tolist() == expected.tolist()
        assert [one.index for one in answer.data] == [0, 1, 2, 3]
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(len(t) + 1 for t in TEXTS)


def test_text_ids_and_lists_of_ids_are_accepted(client: openai.OpenAI) -> None:
    fake = embedder()
    assert (
        client.embeddings.create(model="embedder", input="one").data[0].embedding
        == fake.embed(["one"])[0].tolist()
    )
    ids = fake.tokenize(["abc"])["input_ids"][0].tolist()
    alone = client.embeddings.create(model="embedder", input=ids).data
    assert alone[0].embedding == fake.embed(["abc"])[0].tolist()
    pair = client.embeddings.create(model="embedder", input=[ids, [1, 7]]).data
    assert [one.embedding for one in pair] == [fake.embed(["abc"])[0].tolist(), [8.0, 2.0, 7.0]]


def test_dimensions_equal_to_the_model_s_are_accepted(client: openai.OpenAI) -> None:
    assert len(client.embeddings.create(model="embedder", input="a", dimensions=3).data[0].embedding) == 3
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="embedder", input="a", dimensions=2)
    assert caught.value.param == "dimensions"


def test_unknown_model_returns_model_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model="gpt-4", input="a")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_non_embedding_model_is_refused_with_reason(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="double is a tensors model") as caught:
        client.embeddings.create(model="double", input="a")
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"input": "a"}, 400),
        ({"model": "embedder"}, 400),
        ({"model": "embedder", "input": None}, 400),
        ({"model": "embedder", "input": []}, 400),
        ({"model": "embedder", "input": ""}, 400),
        ({"model": "embedder", "input": ["a", ""]}, 400),
        ({"model": "embedder", "input": ["a", 1]}, 400),
        ({"model": "embedder", "input": [[]]}, 400),
        ({"model": "embedder", "input": [[1], "a"]}, 400),
        ({"model": "embedder", "input": [-1]}, 400),
        ({"model": "embedder", "input": [1000]}, 400),
        ({"model": "embedder", "input": [True]}, 400),
        ({"model": "embedder", "input": [1.5]}, 400),
        ({"model": "embedder", "input": [2**70]}, 400),
        ({"model": "embedder", "input": "a", "encoding_format": "hex"}, 400),
        ({"model": "embedder", "input": "a", "dimensions": 0}, 400),
        ({"model": "embedder", "input": "x" * 600}, 400),
        ({"model": "embedder", "input": ["a"] * 65}, 400),
        ({"model": "embedder", "input": "a", "user": "u", "surprise": {"a": 1}}, 200),
        ({"model": "embedder", "input": "a\u0000b"}, 200),
    ],
)
def test_invalid_embedding_requests_fail_unknown_fields_are_ignored(
    raw: httpx.Client, body: dict[str, Any], status: int
) -> None:
    answer = raw.post("/v1/embeddings", json=body)
    assert answer.status_code == status, answer.text
    if status != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert raw.post("/v1/embeddings", json={"model": "embedder", "input": "a"}).status_code == 200


def test_lone_surrogates_and_wrong_media_types_are_refused(raw: httpx.Client) -> None:
    body = b'{"model": "embedder", "input": "\\ud83d"}'
    headers = {"content-type": "application/json"}
    assert raw.post("/v1/embeddings", content=body, headers=headers).status_code == 400
    assert raw.post("/v1/embeddings", content=body, headers={"content-type": "text/plain"}).status_code == 415


def test_overload_returns_429_and_the_client_retries() -> None:
    fake = embedder()
    with live(fake, limits=ServeLimits(max_queue_requests=1, max_wait_seconds=1)) as server:
        engine = server.service.engines["embedder"]
        engine.queue.latency.observe(1, 1.5)
        engine.queue.running[0] = 1, engine.clock()
        url = f"{server.url}/v1"
        with (
            openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,
            pytest.raises(openai.RateLimitError) as caught,
        ):
            client.embeddings.create(model="embedder", input=["a", "b" * 99])
        assert int(caught.value.response.headers["retry-after"]) >= 1
        with openai.OpenAI(base_url=url, api_key="none", max_retries=2) as client:
            assert client.embeddings.create(model="embedder", input="a").data[0].index == 0
