"""Templates of request bodies: the JSON is parsed once, the numbers every time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from infer.serve.fast_path import body_cache
from tests.support.fake_predictors import Live, double, echo, live
from tests.support.raw_http import ask, send


@pytest.fixture
def server() -> Iterator[Live]:
    with live(double(), echo("bool")) as server:
        yield server


def templates(server: Live) -> dict[Any, Any]:
    caches = dict(server.fast._templates)
    cache = caches.get(server.service.engines["double"])
    return cache.templates if cache else {}


def body(values: Any, *, shape: list[int] | None = None, cut: int = 0, **more: Any) -> tuple[bytes, int]:
    array = np.asarray(values, np.float32)
    given = {"name": "x", "datatype": "FP32", "shape": shape or list(array.shape)}
    given["parameters"] = {"binary_data_size": array.nbytes}
    head = json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}, **more}).encode()
    raw = array.tobytes()
    return head + raw[: len(raw) - cut], len(head)


def status_and_output(server: Live, *given: Any, **options: Any) -> tuple[int, Any]:
    """Status, and y or the error."""
    whole, split = body(*given, **options)
    answer = ask(server, send(whole, b"Inference-Header-Content-Length: %d" % split))
    if answer.status != 200:
        return answer.status, json.loads(answer.body)["error"]
    end = int(answer.headers[b"inference-header-content-length"])
    first = json.loads(answer.body[:end])["outputs"][0]
    raw = answer.body[end : end + first["parameters"]["binary_data_size"]]
    return 200, np.frombuffer(raw, np.float32).reshape(first["shape"]).tolist()


def test_other_numbers_after_the_same_json_are_read_by_a_template(server: Live, taken: list[bytes]) -> None:
    for _ in range(2):
        assert status_and_output(server, [[1, 2, 3, 4]]) == (200, [[2, 4, 6, 8]])
    assert (len(templates(server)), taken) == (1, [])
    assert status_and_output(server, [[5, 6, 7, 8]]) == (200, [[10, 12, 14, 16]])
    assert len(taken) == 1
    for _ in range(3):
        assert status_and_output(server, [[1, 2, 3, 4], [0, 0, 0, 1]]) == (200, [[2, 4, 6, 8], [0, 0, 0, 2]])
    assert (len(templates(server)), len(taken)) == (2, 3)


def test_a_template_with_other_than_its_bytes_is_refused(server: Live) -> None:
    for _ in range(2):
        assert status_and_output(server, [[1, 2, 3, 4]])[0] == 200
        status, error = status_and_output(server, [[1, 2, 3, 4]], cut=4)
    assert (len(templates(server)), status) == (1, 400)
    assert "16 raw bytes are announced, 12 are left" in error


def test_a_body_that_does_not_fit_the_model_has_no_template(server: Live) -> None:
    for _ in range(3):
        assert status_and_output(server, [[1, 2, 3]])[0] == 400
        assert status_and_output(server, [[1, 2, 3, 4]], parameters={"sequence_id": 1})[0] == 400
    assert not templates(server)


def test_a_request_with_an_id_has_no_template(server: Live) -> None:
    for _ in range(3):
        assert status_and_output(server, [[1, 2, 3, 4]], id="mine")[0] == 200
    assert not templates(server)


def test_a_template_keeps_timeout_and_priority(server: Live) -> None:
    options = {"parameters": {"timeout": 250_000, "priority": 1, "binary_data_output": True}}
    for _ in range(2):
        assert status_and_output(server, [[1, 2, 3, 4]], **options)[0] == 200
    (template,) = templates(server).values()
    assert (template.timeout, template.priority) == (0.25, 1)
    assert status_and_output(server, [[1, 2, 3, 4]], **options)[0] == 200


def test_bytes_of_a_bool_are_checked_every_time(server: Live) -> None:
    head = json.dumps(
        {
            "inputs": [
                {"name": "x", "datatype": "BOOL", "shape": [1, 2], "parameters": {"binary_data_size": 2}}
            ]
        }
    ).encode()
    split = b"Inference-Header-Content-Length: %d" % len(head)
    path = b"/v2/models/bool/infer"
    assert [
        ask(server, send(head + raw, split, path=path)).status for raw in (b"\0\1", b"\0\1", b"\0\2")
    ] == [
        200,
        200,
        400,
    ]


def post_text(server: Live, text: str) -> tuple[int, Any]:
    answer = ask(server, send(text.encode()))
    told = json.loads(answer.body)
    return answer.status, told["outputs"][0]["data"] if answer.status == 200 else told["error"]


ROW = '{"inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"data":%s}]%s}'


def test_other_numbers_in_the_same_json_are_read_by_a_template(server: Live, taken: list[bytes]) -> None:
    for _ in range(2):
        assert post_text(server, ROW % ("[1,2,3,4]", "")) == (200, [2, 4, 6, 8])
    assert (len(templates(server)), taken) == (1, [])
    for _ in range(2):
        assert post_text(server, ROW % ("[5, 6.5 ,7e0,-8]", "")) == (200, [10, 13, 14, -16])
    assert (len(templates(server)), len(taken)) == (1, 2)


@pytest.mark.parametrize(
    "numbers",
    [
        "[1,2,3,NaN]",
        "[1,2,3,1e999]",
        '[1,2,3,"4"]',
        "[1,2,3,4,]",
        "[1,2,3,null]",
        "[1,2,3,true]",
        "[1,2,3",
        "[]",
    ],
)
def test_bad_numbers_in_known_json_get_the_same_error(server: Live, numbers: str, taken: list[bytes]) -> None:
    before = post_text(server, ROW % (numbers, ""))
    assert before[0] == 400
    for _ in range(2):
        assert post_text(server, ROW % ("[1,2,3,4]", ""))[0] == 200
    assert post_text(server, ROW % (numbers, "")) == before
    assert len(taken) == 1 + numbers.endswith("]")


def test_lists_of_lists_have_no_template(server: Live) -> None:
    for _ in range(3):
        assert post_text(server, ROW % ("[[1,2,3,4]]", "")) == (200, [2, 4, 6, 8])
    assert not templates(server)


def test_data_in_other_places_has_no_template(server: Live) -> None:
    for more in (',"parameters":{"data":[1]}', ',"parameters":{"a":"\\u0022data\\u0022"}'):
        for _ in range(3):
            assert post_text(server, ROW % ("[1,2,3,4]", more)) == (200, [2, 4, 6, 8])
    assert not templates(server)


def test_a_full_body_cache_is_cleared(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_cache, "MAX_TEMPLATES", 2)
    for rows in range(1, 6):
        for _ in range(2):
            assert status_and_output(server, [[1, 2, 3, 4]] * rows)[0] == 200
    assert 0 < len(templates(server)) <= 2
