"""Requests of one text on the fast path: same answers and errors, with texts tokenized together."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from infer.errors import ArtifactError, OverloadedError
from infer.serve.batching import tensor_engine
from infer.serve.fork_server.messages import TokenRows
from infer.serve.limits import ServeLimits
from infer.serve.llm.tokenizer_batches import TokenizerBatches
from tests.support.fake_predictors import Live, embedder, live
from tests.support.raw_http import Answer, ask, connect, get, read, send
from tests.support.simultaneous_requests import standing

PATH = b"/v2/models/embedder/infer"


class FakeTexts:
    """Tokenizer pool in this process. "bad" fails; "slow" waits for half a second. `messages`: texts of each."""

    def __init__(self, predictor: Any) -> None:
        self._predictor, self.messages = predictor, list[list[str]]()
        self._batches = TokenizerBatches(self._encode)
        predictor.pad = self._pad

    def start(self) -> None:
        pass

    def close(self) -> None:
        self._batches.close()

    def tokenize_soon(self, text: str, where: str) -> asyncio.Future[TokenRows]:
        return self._batches.add([text], len(text), where)

    async def encode_typed(self, texts: Sequence[str], where: str) -> tuple[list[list[int]], list[list[int]]]:
        found = await self._batches.rows(texts, sum(map(len, texts)), where)
        return found.rows, found.types

    async def _encode(self, texts: Any, size: int, where: str) -> TokenRows:
        self.messages.append(list(texts))
        await asyncio.sleep(0.5 if "slow" in texts else 0)
        if "bad" in texts:
            raise ArtifactError("the tokenizer of this model took longer than 5 s for 3 characters")
        return TokenRows([self._predictor.tokenize([text])["input_ids"][0].tolist() for text in texts])

    def _pad(self, rows: list[list[int]], types: Any = None) -> dict[str, Any]:
        return self._predictor.tokenize(["".join(chr(number - 2) for number in row[1:]) for row in rows])


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[FakeTexts]:
    found: list[FakeTexts] = []

    def pool(predictor: Any) -> FakeTexts:
        found.append(FakeTexts(predictor))
        return found[-1]

    monkeypatch.setattr(tensor_engine, "encoder_tokenizer_pool", pool)
    return found


@pytest.fixture
def server(pools: list[FakeTexts]) -> Iterator[Live]:
    """Knows the template of `body`."""
    with live(embedder(), limits=ServeLimits(max_json_bytes=20_000)) as server:
        assert [ask(server, text(word)).status for word in ("a", "bb")] == [200] * 2
        yield server


def body(data: str, **more: Any) -> bytes:
    given = {"name": "text", "datatype": "BYTES", "shape": [1], "data": "DATA"}
    return json.dumps({"inputs": [given], **more}).replace('"DATA"', data).encode("utf-8", "surrogatepass")


def text(word: str, **more: Any) -> bytes:
    return send(body(json.dumps([word], ensure_ascii=False), **more), path=PATH)


def result(answer: Answer) -> Any:
    told = json.loads(answer.body)
    return answer.status, told.get("error") or told["outputs"]


@pytest.mark.parametrize(
    "word",
    ["a", 'with: "marks" and ] brackets }', "größer 日本 \U0001f600", 'ends with "]', "\\u0041 \t", ""],
)
def test_text_on_the_fast_path_gets_the_ordinary_answer(server: Live, taken: list[bytes], word: str) -> None:
    fast = result(ask(server, text(word)))
    assert len(taken) == 1
    with live(embedder(), fast=False) as ordinary:
        assert fast == result(ask(ordinary, text(word)))


@pytest.mark.parametrize(
    "data",
    [
        '["a", "b"]',
        "[]",
        "[1]",
        '[["a"]]',
        '["a"',
        '["\\ud800"]',
        '["a"], "data": ["b"]',
        '["a\x01"]',
        "null",
    ],
)
def test_other_data_in_a_known_body_is_left_to_the_ordinary_path(
    server: Live, taken: list[bytes], data: str
) -> None:
    request = send(body(data), path=PATH)
    fast = result(ask(server, request))
    assert taken == []
    with live(embedder(), fast=False) as ordinary:
        assert fast == result(ask(ordinary, request))


@pytest.mark.parametrize("word", ["x" * 2500, "x" * 25_000])
def test_a_long_text_is_left_to_the_ordinary_path(server: Live, taken: list[bytes], word: str) -> None:
    assert ask(server, text(word)).status in (400, 413)
    assert taken == []


@pytest.mark.parametrize("more", [{"id": "mine"}, {"parameters": {"sequence_id": 1}}])
def test_bodies_with_more_than_a_text_have_no_template(
    server: Live, taken: list[bytes], more: dict[str, Any]
) -> None:
    for word in ("a", "b", "c"):
        ask(server, text(word, **more))
    assert taken == []


def test_texts_that_arrive_together_are_tokenized_together(
    server: Live, taken: list[bytes], pools: list[FakeTexts]
) -> None:
    words = ["slow", *(f"word {number}" for number in range(6))]
    with ExitStack() as stack:
        connections = [stack.enter_context(connect(server)) for _ in words]
        for connection, word in zip(connections, words, strict=True):
            connection.sendall(text(word))
            time.sleep(0.1 if word == "slow" else 0)
        answers = [read(connection, bytearray()) for connection in connections]
    assert [answer.status for answer in answers] == [200] * 7
    assert len(taken) == 7
    assert sorted(map(len, pools[0].messages[2:])) == [1, 6]
    counts = [json.loads(answer.body)["outputs"][0]["data"][1] for answer in answers]
    assert counts == [len(word) + 1 for word in words]


def test_a_text_that_the_tokenizer_fails_on_fails_alone(
    server: Live, taken: list[bytes], pools: list[FakeTexts]
) -> None:
    words = ["slow", "good", "bad"]
    with ExitStack() as stack:
        connections = [stack.enter_context(connect(server)) for _ in words]
        for connection, word in zip(connections, words, strict=True):
            connection.sendall(text(word))
            time.sleep(0.1 if word == "slow" else 0)
        answers = [read(connection, bytearray()) for connection in connections]
    assert [answer.status for answer in answers[:2]] == [200, 200]
    with live(embedder(), fast=False) as ordinary:
        assert result(answers[2]) == result(ask(ordinary, text("bad")))
    assert len(taken) == 3


def test_a_text_whose_client_left_is_not_computed(server: Live, taken: list[bytes]) -> None:
    ran = len(server.service.models["embedder"].predictor.batches)
    with connect(server) as connection:
        connection.sendall(text("slow"))
        time.sleep(0.1)
    until = time.monotonic() + 5
    while server.service.active and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.6)
    assert (server.service.active, len(taken)) == (0, 1)
    assert len(server.service.models["embedder"].predictor.batches) == ran
    assert b'code="499"' in ask(server, get(b"/metrics")).body


def together(server: Live, words: Sequence[str]) -> list[Answer]:
    """Send one text on each of several connections, all read in one iteration of the event loop."""
    with ExitStack() as stack:
        connections = [stack.enter_context(connect(server)) for _ in words]
        for connection in connections:  # known to the server before it stands
            connection.sendall(text("a"))
            read(connection, bytearray())
        with standing(server, "embedder"):
            for connection, word in zip(connections, words, strict=True):
                connection.sendall(text(word))
            time.sleep(0.2)
        return [read(connection, bytearray()) for connection in connections]


def test_admission_is_checked_once_for_texts_of_one_loop_iteration(
    server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, checks = server.service.engines["embedder"], list[float]()
    check = engine.check_admission

    def counted(**how: Any) -> None:
        checks.append(engine.clock())
        check(**how)

    words = [f"word {number}" for number in range(8)]
    together(server, ["a"])
    monkeypatch.setattr(engine, "check_admission", counted)
    answers = together(server, words)
    assert [answer.status for answer in answers] == [200] * 8
    assert len(checks) == 8 + 1  # those that made the connections known came one by one


def test_texts_of_one_loop_iteration_are_each_refused(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, refusals = server.service.engines["embedder"], [0]
    check = engine.check_admission

    def third(**how: Any) -> None:
        refusals[0] += 1
        if refusals[0] > 3:
            raise OverloadedError("queue wait 2.0 s exceeds the 1.0 s limit", retry_after=2)
        check(**how)

    monkeypatch.setattr(engine, "check_admission", third)
    assert [answer.status for answer in together(server, ["b", "c", "d"])] == [503] * 3
    assert refusals == [6]


def test_a_draining_server_refuses_texts_of_known_heads(server: Live) -> None:
    server.service.drain()
    assert ask(server, text("a")).status == 503


def test_deadline_of_a_text_is_that_of_its_header(pools: list[FakeTexts], taken: list[bytes]) -> None:
    model = embedder()
    run = model.function
    model.function = lambda inputs: (time.sleep(0.4), run(inputs))[1]
    with live(model) as server:
        request = send(body('["a"]'), b"X-Request-Timeout-Ms: 150", path=PATH)
        assert [ask(server, request).status for _ in range(3)] == [504] * 3
        assert len(taken) == 1
