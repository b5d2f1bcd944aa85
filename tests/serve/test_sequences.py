"""Sequences over HTTP: the server carries the state of each from call to call, for its own tenant alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from infer import Predictor
from infer.serve.limits import ServeLimits
from tests.support import stateful_models as models
from tests.support.fake_predictors import Live, live


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make(tmp_path_factory.mktemp("lstm"), "lstm")


@pytest.fixture(scope="module")
def server(artifact: Path) -> Iterator[Live]:
    with live(Predictor.load(artifact)) as running:
        yield running


def ask(url: str, x: np.ndarray, key: str = "", **parameters: Any) -> httpx.Response:
    tensor = {"name": "x", "datatype": "FP32", "shape": list(x.shape), "data": x.ravel().tolist()}
    body = {"inputs": [tensor], "parameters": parameters}
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.post(f"{url}/v2/models/lstm/infer", json=body, headers=headers, timeout=30)


def answer(reply: httpx.Response) -> np.ndarray:
    assert reply.status_code == 200, reply.text
    found = {one["name"]: one for one in reply.json()["outputs"]}
    return np.reshape(found["output_0"]["data"], found["output_0"]["shape"])


def follow(url: str, id: int | str, xs: list[np.ndarray]) -> list[np.ndarray]:
    last = len(xs) - 1
    each = ({"sequence_start": i == 0, "sequence_end": i == last} for i in range(len(xs)))
    return [answer(ask(url, x, sequence_id=id, **more)) for x, more in zip(xs, each, strict=True)]


def test_two_interleaved_sequences_have_each_their_own_state(server: Live) -> None:
    both = {7: models.pieces(0, 10), "b": models.pieces(1, 10)}
    got: dict[int | str, list[np.ndarray]] = {7: [], "b": []}
    for i in range(10):
        for id, xs in both.items():
            got[id].append(answer(ask(server.url, xs[i], sequence_id=id, sequence_start=i == 0)))
    for id, xs in both.items():
        np.testing.assert_allclose(got[id], models.by_hand(xs), atol=1e-5)


def test_24_sequences_at_once_have_each_their_own_state(server: Live) -> None:
    sequences = {100 + seed: models.pieces(seed, 8) for seed in range(24)}
    with ThreadPoolExecutor(24) as pool:
        found = list(pool.map(lambda one: follow(server.url, *one), sequences.items()))
    for xs, got in zip(sequences.values(), found, strict=True):
        np.testing.assert_allclose(got, models.by_hand(xs), atol=1e-5)


def test_calls_of_one_sequence_run_in_the_order_they_came(server: Live) -> None:
    xs = models.pieces(9, 6)
    answer(ask(server.url, xs[0], sequence_id=9, sequence_start=True))
    with ThreadPoolExecutor(5) as pool:
        replies = list(pool.map(lambda x: ask(server.url, x, sequence_id=9), [xs[1]] * 5))
    want = models.by_hand([xs[0], *[xs[1]] * 5])[1:]
    got = [answer(reply) for reply in replies]
    for one in want:
        assert any(np.allclose(one, other, atol=1e-5) for other in got)


def test_states_come_back_only_where_they_are_asked_for(server: Live) -> None:
    (x,) = models.pieces(2, 1)
    reply = ask(server.url, x, sequence_id=2, sequence_start=True, sequence_end=True).json()
    assert [one["name"] for one in reply["outputs"]] == ["output_0"]
    alone = ask(server.url, x).json()
    assert [one["name"] for one in alone["outputs"]] == ["output_0", "output_1", "output_2"]
    assert alone["outputs"][0]["data"] == pytest.approx(reply["outputs"][0]["data"])


def test_a_sequence_that_is_begun_again_begins_with_zeros(server: Live) -> None:
    first, second = models.pieces(3, 2)
    for _ in range(2):
        answer(ask(server.url, second, sequence_id=3, sequence_start=True))
    got = answer(ask(server.url, first, sequence_id=3, sequence_start=True))
    np.testing.assert_allclose(got, models.by_hand([first])[0], atol=1e-5)


@pytest.mark.parametrize(
    ("parameters", "status", "said"),
    [
        ({"sequence_id": 77}, 404, "no sequence '77' is open"),
        ({"sequence_id": 78, "sequence_end": True}, 404, "no sequence '78' is open"),
        ({"sequence_id": -1}, 400, "expected a number from 1"),
        ({"sequence_id": "x" * 129}, 400, "1 to 128 characters"),
        ({"sequence_id": 1.5}, 400, "expected a number from 1"),
        ({"sequence_start": True}, 400, "expected a sequence_id"),
        ({"sequence_id": 79, "sequence_start": "yes"}, 400, "true or false for sequence_start"),
    ],
)
def test_a_wrong_sequence_is_a_client_error(
    server: Live, parameters: dict[str, Any], status: int, said: str
) -> None:
    reply = ask(server.url, models.pieces(0, 1)[0], **parameters)
    assert (reply.status_code, said in reply.text) == (status, True), reply.text


def test_an_ended_sequence_and_one_whose_first_call_failed_are_gone(server: Live) -> None:
    (x,) = models.pieces(4, 1)
    answer(ask(server.url, x, sequence_id=4, sequence_start=True, sequence_end=True))
    assert ask(server.url, x, sequence_id=4).status_code == 404
    assert ask(server.url, x[:, :2], sequence_id=5, sequence_start=True).status_code == 400
    assert ask(server.url, x, sequence_id=5).status_code == 404


def test_a_call_that_fails_in_the_middle_leaves_the_state(server: Live) -> None:
    first, second = models.pieces(6, 2)
    answer(ask(server.url, first, sequence_id=6, sequence_start=True))
    assert ask(server.url, second.repeat(2, 0), sequence_id=6).status_code == 400
    got = answer(ask(server.url, second, sequence_id=6))
    np.testing.assert_allclose(got, models.by_hand([first, second])[1], atol=1e-5)


def test_a_tenant_never_reaches_the_state_of_another(artifact: Path) -> None:
    first, second = models.pieces(0, 2)
    with live(Predictor.load(artifact), api_key=["one", "two"]) as server:
        answer(ask(server.url, first, key="one", sequence_id=1, sequence_start=True))
        assert ask(server.url, second, key="two", sequence_id=1).status_code == 404
        answer(ask(server.url, second, key="two", sequence_id=1, sequence_start=True))
        ask(server.url, second, key="two", sequence_id=1, sequence_end=True)
        got = answer(ask(server.url, second, key="one", sequence_id=1))
    np.testing.assert_allclose(got, models.by_hand([first, second])[1], atol=1e-5)


def test_the_number_of_sequences_and_their_idle_time_are_bounded(artifact: Path) -> None:
    (x,) = models.pieces(0, 1)
    limits = ServeLimits(max_sequences=2, sequence_idle_seconds=1.0)
    with live(Predictor.load(artifact), limits=limits) as server:
        for id in (1, 2):
            answer(ask(server.url, x, sequence_id=id, sequence_start=True))
        refused = ask(server.url, x, sequence_id=3, sequence_start=True)
        assert (refused.status_code, "2 sequences are open" in refused.text) == (503, True)
        assert int(refused.headers["retry-after"]) >= 1
        time.sleep(1.1)
        assert ask(server.url, x, sequence_id=1).status_code == 404
        answer(ask(server.url, x, sequence_id=3, sequence_start=True))


def test_one_of_several_tenants_has_half_of_the_sequences(artifact: Path) -> None:
    (x,) = models.pieces(0, 1)
    limits = ServeLimits(max_sequences=4)
    with live(Predictor.load(artifact), limits=limits, api_key=["one", "two"]) as server:
        each = [ask(server.url, x, key="one", sequence_id=i, sequence_start=True) for i in (1, 2, 3)]
        assert [reply.status_code for reply in each] == [200, 200, 503]
        answer(ask(server.url, x, key="two", sequence_id=1, sequence_start=True))


def test_the_memory_of_states_is_bounded(artifact: Path) -> None:
    (x,) = models.pieces(0, 1)
    with live(Predictor.load(artifact), limits=ServeLimits(max_sequence_bytes=300)) as server:
        answer(ask(server.url, x, sequence_id=1, sequence_start=True))
        assert ask(server.url, x, sequence_id=2, sequence_start=True).status_code == 503
