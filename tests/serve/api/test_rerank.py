"""/rerank, /score, /classify and /predict: each client's fields and answers, against a server with fake models."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from infer.serve.limits import ServeLimits
from tests.support.fake_predictors import Live, classifier, double, embedder, live

JSON = dict[str, Any]
DOCUMENTS = ["xx", "b", "xxx", "x"]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    ranker, raw = classifier("ranker", ["x"]), classifier("raw", ["x"], activation="identity")
    moods = classifier("moods", ["good", "bad", "dull"])
    moods.info.meta["lower_case"] = True
    with live(ranker, raw, moods, embedder(), double(), limits=ServeLimits(max_queue_rows=50)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


def post(client: httpx.Client, path: str, **fields: Any) -> Any:
    answer = client.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def sigmoid(value: float) -> float:
    return 1 / (1 + np.exp(-value))


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank_sorts_documents_as_cohere_and_jina_do(client: httpx.Client, path: str) -> None:
    body = post(client, path, model="ranker", query="q", documents=DOCUMENTS, top_n=3)
    assert re.fullmatch("rerank-[0-9a-f]{24}", body.pop("id"))
    tokens = sum(len(f"q|{text}") + 1 for text in DOCUMENTS)
    assert body.pop("usage") == {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
    assert [(r["index"], r["relevance_score"]) for r in body.pop("results")] == [
        (i, pytest.approx(sigmoid(n))) for i, n in ((2, 3), (0, 2), (3, 1))
    ]
    assert body == {"model": "ranker", "meta": {"billed_units": {"search_units": 1}}}


def test_documents_may_be_objects_and_are_returned_when_asked_for(client: httpx.Client) -> None:
    fields = {"model": "ranker", "query": "q", "documents": [{"text": "x"}, "xx"]}
    assert [r.get("document") for r in post(client, "/v1/rerank", **fields)["results"]] == [None, None]
    asked = post(client, "/v1/rerank", **fields, return_documents=True)["results"]
    assert [r["document"] for r in asked] == [{"text": "xx"}, {"text": "x"}]


def test_texts_are_ranked_in_the_form_of_tei(client: httpx.Client) -> None:
    answer = post(
        client, "/rerank", model="ranker", query="q", texts=DOCUMENTS, raw_scores=True, return_text=True
    )
    assert answer == [
        {"index": 2, "score": 3.0, "text": "xxx"},
        {"index": 0, "score": 2.0, "text": "xx"},
        {"index": 3, "score": 1.0, "text": "x"},
        {"index": 1, "score": 0.0, "text": "b"},
    ]
    answer = post(client, "/rerank", model="ranker", query="q", texts=["x"])
    assert answer == [{"index": 0, "score": pytest.approx(sigmoid(1))}]


def test_the_activation_of_the_model_is_used(client: httpx.Client) -> None:
    (result,) = post(client, "/v1/rerank", model="raw", query="x", documents=["xx"])["results"]
    assert result["relevance_score"] == 3.0


def test_an_embedding_model_ranks_by_cosine(client: httpx.Client) -> None:
    vectors = embedder().embed(["abc", "abc", "z"])
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    fields = {"model": "embedder", "query": "abc", "documents": ["z", "abc"]}
    results = post(client, "/v1/rerank", **fields)["results"]
    assert [r["index"] for r in results] == [1, 0]
    assert [r["relevance_score"] for r in results] == pytest.approx([1.0, float(unit[0] @ unit[2])], abs=1e-6)


@pytest.mark.parametrize(
    ("first", "second", "values"),
    [("x", "xx", [3]), ("x", ["x", "xx"], [2, 3]), (["x"], ["b"], [1]), (["x", "b"], ["x", "b"], [2, 0])],
)
def test_score_compares_one_with_many_or_pairwise_as_vllm_does(
    client: httpx.Client, first: Any, second: Any, values: list[float]
) -> None:
    body = post(client, "/score", model="ranker", text_1=first, text_2=second)
    assert [one["score"] for one in body["data"]] == pytest.approx([sigmoid(value) for value in values])
    assert [one["index"] for one in body["data"]] == list(range(len(values)))
    assert (body["object"], body["model"]) == ("list", "ranker")
    assert {one["object"] for one in body["data"]} == {"score"}
    assert abs(body["created"] - time.time()) < 100
    raw = post(client, "/v1/score", model="ranker", text_1=first, text_2=second, use_activation=False)
    assert [one["score"] for one in raw["data"]] == values


def test_classify_gives_the_best_label_and_all_probabilities_as_vllm_does(client: httpx.Client) -> None:
    body = post(client, "/classify", model="moods", input=["GGG", "b"])
    assert [one["label"] for one in body["data"]] == ["good", "bad"]
    logits = np.array([3.0, 0.0, 0.0])
    assert body["data"][0]["probs"] == pytest.approx((np.exp(logits) / np.exp(logits).sum()).tolist())
    assert {one["num_classes"] for one in body["data"]} == {3}
    assert body["usage"]["prompt_tokens"] == 6
    raw = post(client, "/classify", model="moods", input="gg", use_activation=False)
    assert raw["data"][0]["probs"] == [2.0, 0.0, 0.0]


@pytest.mark.parametrize("path", ["/predict", "/classify"])
@pytest.mark.parametrize(
    ("inputs", "best"),
    [
        ("bg b", "bad"),
        (["g", "gb"], "good"),
        (["d"], "dull"),
        ([["g"], ["b", "b"]], ["good", "bad"]),
    ],
    ids=["text", "pair", "list of one", "batch"],
)
def test_inputs_are_labelled_in_the_form_of_tei(
    client: httpx.Client, path: str, inputs: Any, best: Any
) -> None:
    answer = post(client, path, model="moods", inputs=inputs)
    for labels, name in [(answer, best)] if isinstance(best, str) else zip(answer, best, strict=True):
        assert labels[0]["label"] == name
        scores = [one["score"] for one in labels]
        assert scores == sorted(scores, reverse=True)
        assert sum(scores) == pytest.approx(1)
        assert {one["label"] for one in labels} == {"good", "bad", "dull"}


def test_pairs_of_many_requests_are_batched_together(server: Live, client: httpx.Client) -> None:
    metric = 'infer_prompt_tokens_total{model="ranker",version="1"}'

    def tokens() -> float:
        lines = client.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith(metric)).split()[-1])

    before = tokens()
    results = post(client, "/v1/rerank", model="ranker", query="q", documents=["x" * n for n in range(1, 41)])
    assert [r["index"] for r in results["results"]] == list(range(39, -1, -1))
    assert tokens() - before == results["usage"]["prompt_tokens"]


REFUSED: list[tuple[str, str, JSON, int, str]] = [
    ("both", "/rerank", {"query": "q", "documents": ["a"], "texts": ["a"]}, 400, "either documents"),
    ("neither", "/rerank", {"query": "q"}, 400, "either documents"),
    ("none", "/v1/rerank", {"query": "q", "documents": []}, 400, "expected 1 to 50 texts, got 0"),
    ("many", "/v1/rerank", {"query": "q", "documents": ["a"] * 51}, 400, "expected 1 to 50 texts, got 51"),
    ("empty", "/v1/rerank", {"query": "q", "documents": ["a", ""]}, 400, "documents[1]"),
    ("empty query", "/v1/rerank", {"query": "", "documents": ["a"]}, 400, "not empty"),
    ("negative", "/v1/rerank", {"query": "q", "documents": ["a"], "top_n": -1}, 400, "top_n"),
    ("images", "/v1/rerank", {"query": "q", "documents": [{"image": "a"}]}, 400, "documents"),
    ("uncut", "/rerank", {"query": "q", "texts": ["a"], "truncate": False}, 400, "truncate"),
    ("three labels", "/v1/rerank", {"query": "q", "documents": ["a"], "model": "moods"}, 400, "3 labels"),
    (
        "tensors",
        "/v1/rerank",
        {"query": "q", "documents": ["a"], "model": "double"},
        400,
        "can't compare texts",
    ),
    ("unknown", "/v1/rerank", {"query": "q", "documents": ["a"], "model": "nope"}, 404, "no such model"),
    ("nan", "/v1/rerank", {"query": "?", "documents": ["a"]}, 500, "not finite"),
    ("lengths", "/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, 400, "as many as text_2"),
    ("no text", "/score", {"text_1": "a", "text_2": []}, 400, "expected 1 to 50 texts, got 0"),
    ("input", "/classify", {"model": "moods"}, 400, "either input"),
    ("embeds", "/classify", {"model": "embedder", "input": "a"}, 400, "can't classify"),
    ("surrogate", "/v1/rerank", {"query": "\ud800", "documents": ["a"]}, 400, "surrogate"),
]


@pytest.mark.parametrize(
    ("path", "body", "status", "text"), [case[1:] for case in REFUSED], ids=[c[0] for c in REFUSED]
)
def test_an_invalid_rerank_request_is_refused_with_a_message(
    client: httpx.Client, path: str, body: JSON, status: int, text: str
) -> None:
    import json

    answer = client.post(
        path, content=json.dumps({"model": "ranker", **body}), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == status, answer.text
    assert text in answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("inputs", [[], ["a", "b", "c"], [["a", "b", "c"]], [["a"], "b"], [[]], "", [[""]]])
def test_predict_refuses_in_the_form_of_tei(client: httpx.Client, inputs: Any) -> None:
    answer = client.post("/predict", json={"model": "moods", "inputs": inputs})
    assert answer.status_code == 400
    assert answer.json()["error_type"] == "Validation"
    assert "inputs" in answer.json()["error"]


def test_the_model_may_be_left_out_where_one_fits(client: httpx.Client) -> None:
    answer = client.post("/v1/rerank", json={"query": "q", "documents": ["a"]})
    assert answer.status_code == 400
    assert "one of ranker, raw, moods, embedder" in answer.json()["error"]["message"]
    with live(classifier("only", ["x"]), double()) as server:
        answer = httpx.post(f"{server.url}/v1/rerank", json={"query": "q", "documents": ["a"]})
        assert answer.json()["model"] == "only"
    with live(double()) as server:
        assert httpx.post(f"{server.url}/score", json={"text_1": "a", "text_2": "a"}).status_code == 404


def test_a_key_is_needed_and_a_deadline_is_honoured() -> None:
    with live(classifier("ranker", ["x"]), api_key="secret") as server:
        body = {"query": "q", "documents": ["x"]}
        assert httpx.post(f"{server.url}/v1/rerank", json=body).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert httpx.post(f"{server.url}/v1/rerank", json=body, headers=headers).status_code == 200
        headers["X-Request-Timeout-Ms"] = "x"
        assert httpx.post(f"{server.url}/v1/rerank", json=body, headers=headers).status_code == 400


def test_a_prompt_of_the_model_is_put_before_embedded_texts() -> None:
    fake = embedder()
    fake.info.meta.update(prompts={"query": "ask: ", "document": ""}, default_prompt=None)
    with live(fake) as server:
        url = f"{server.url}/v1/embeddings"
        plain = httpx.post(url, json={"model": fake.info.name, "input": "ask: a"}).json()["data"][0]
        asked = httpx.post(url, json={"model": fake.info.name, "input": "a", "prompt_name": "query"}).json()[
            "data"
        ][0]
        assert asked == plain
        wrong = httpx.post(url, json={"model": fake.info.name, "input": "a", "prompt_name": "title"})
        assert wrong.status_code == 400
        assert "expected a prompt of query, document, got 'title'" in wrong.text


def test_pairs_keep_their_token_types_in_the_forked_tokenizer(tmp_path: Path) -> None:
    import asyncio

    from infer.llm.text.tokenizer import Tokenizer
    from infer.serve.llm import tokenizer_pool
    from tests.load.test_sentence_transformers import PAIRS, tokenizer

    tokenizer().save_pretrained(tmp_path)

    async def encoded() -> tuple[list[list[int]], list[list[int]]]:
        model = embedder("e")
        model.change(path=str(tmp_path), sizes={"seq": (1, 40)})
        model.tokenizer = None
        texts = tokenizer_pool.encoder_tokenizer(model)
        assert texts is not None
        texts.start()
        try:
            return await texts.encode_typed(PAIRS, "texts")
        finally:
            texts.close()

    rows, types = asyncio.run(encoded())
    assert (rows, types) == Tokenizer(tmp_path / "tokenizer.json", max_length=40).encode_typed(PAIRS)
    assert {kind for row in types for kind in row} == {0, 1}
