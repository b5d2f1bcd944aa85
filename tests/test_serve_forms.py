"""Requests whose JSON came before in front of other raw tensors: read once, answered as ever."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from infer.serve import forms
from tests.rude import ask, send
from tests.serve_fakes import Live, double, echo, live


@pytest.fixture
def server() -> Iterator[Live]:
    with live(double(), echo("bool")) as server:
        yield server


def body(values: Any, *, shape: list[int] | None = None, cut: int = 0, **more: Any) -> tuple[bytes, int]:
    array = np.asarray(values, np.float32)
    given = {"name": "x", "datatype": "FP32", "shape": shape or list(array.shape)}
    given["parameters"] = {"binary_data_size": array.nbytes}
    head = json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}, **more}).encode()
    raw = array.tobytes()
    return head + raw[: len(raw) - cut], len(head)


def asked(server: Live, *given: Any, **options: Any) -> tuple[int, Any]:
    """Status, and y or the error."""
    whole, split = body(*given, **options)
    answer = ask(server, send(whole, b"Inference-Header-Content-Length: %d" % split))
    if answer.status != 200:
        return answer.status, json.loads(answer.body)["error"]
    end = int(answer.headers[b"inference-header-content-length"])
    first = json.loads(answer.body[:end])["outputs"][0]
    raw = answer.body[end : end + first["parameters"]["binary_data_size"]]
    return 200, np.frombuffer(raw, np.float32).reshape(first["shape"]).tolist()


def test_other_numbers_behind_the_same_json_are_answered_by_a_form(server: Live) -> None:
    known = server.service.engines["double"].forms
    assert asked(server, [[1, 2, 3, 4]]) == (200, [[2, 4, 6, 8]])
    assert len(known) == 1
    assert asked(server, [[5, 6, 7, 8]]) == (200, [[10, 12, 14, 16]])
    assert asked(server, [[1, 2, 3, 4], [0, 0, 0, 1]]) == (200, [[2, 4, 6, 8], [0, 0, 0, 2]])
    assert len(known) == 2


def test_a_known_form_with_other_than_its_bytes_is_refused(server: Live) -> None:
    assert asked(server, [[1, 2, 3, 4]])[0] == 200
    status, error = asked(server, [[1, 2, 3, 4]], cut=4)
    assert status == 400
    assert "16 raw bytes are announced, 12 are left" in error


def test_what_does_not_fit_the_model_is_never_a_form(server: Live) -> None:
    for _ in range(2):
        assert asked(server, [[1, 2, 3]])[0] == 400
        assert asked(server, [[1, 2, 3, 4]], parameters={"sequence_id": 1})[0] == 400
    assert not server.service.engines["double"].forms


def test_a_request_with_an_id_is_read_whole(server: Live) -> None:
    for _ in range(2):
        assert asked(server, [[1, 2, 3, 4]], id="mine")[0] == 200
    assert not server.service.engines["double"].forms


def test_the_time_that_a_form_names_holds_again(server: Live) -> None:
    options = {"parameters": {"timeout": 250_000, "priority": 1, "binary_data_output": True}}
    assert asked(server, [[1, 2, 3, 4]], **options)[0] == 200
    (form,) = server.service.engines["double"].forms.values()
    assert (form.timeout, form.priority) == (0.25, 1)
    assert asked(server, [[1, 2, 3, 4]], **options)[0] == 200


def test_bytes_of_a_bool_are_looked_at_every_time(server: Live) -> None:
    head = json.dumps(
        {
            "inputs": [
                {"name": "x", "datatype": "BOOL", "shape": [1, 2], "parameters": {"binary_data_size": 2}}
            ]
        }
    ).encode()
    split = b"Inference-Header-Content-Length: %d" % len(head)
    path = b"/v2/models/bool/infer"
    assert [ask(server, send(head + raw, split, path=path)).status for raw in (b"\x00\x01", b"\x00\x02")] == [
        200,
        400,
    ]


def said(server: Live, text: str) -> tuple[int, Any]:
    answer = ask(server, send(text.encode()))
    told = json.loads(answer.body)
    return answer.status, told["outputs"][0]["data"] if answer.status == 200 else told["error"]


ROW = '{"inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"data":%s}]%s}'


def test_other_numbers_in_the_same_json_are_answered_by_a_form(server: Live) -> None:
    known = server.service.engines["double"].forms
    assert said(server, ROW % ("[1,2,3,4]", "")) == (200, [2, 4, 6, 8])
    assert len(known) == 1
    assert said(server, ROW % ("[5, 6.5 ,7e0,-8]", "")) == (200, [10, 13, 14, -16])
    assert said(server, ROW % ("[1,2,3]", "")) == (400, said(server, ROW % ("[1,2,3]", ',"x":1'))[1])
    assert len(known) == 1


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
def test_bad_numbers_in_known_json_are_told_as_in_unknown(server: Live, numbers: str) -> None:
    before = said(server, ROW % (numbers, ""))
    assert before[0] == 400
    assert said(server, ROW % ("[1,2,3,4]", ""))[0] == 200
    assert said(server, ROW % (numbers, "")) == before


def test_lists_of_lists_take_the_whole_way(server: Live) -> None:
    for _ in range(2):
        assert said(server, ROW % ("[[1,2,3,4]]", "")) == (200, [2, 4, 6, 8])
    assert not server.service.engines["double"].forms


def test_data_in_other_places_is_no_form(server: Live) -> None:
    for more in (',"parameters":{"data":[1]}', ',"parameters":{"a":"\\u0022data\\u0022"}'):
        for _ in range(2):
            assert said(server, ROW % ("[1,2,3,4]", more)) == (200, [2, 4, 6, 8])
    assert not server.service.engines["double"].forms


def test_forms_are_forgotten_when_they_become_too_many(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "MOST_FORMS", 2)
    for rows in range(1, 6):
        assert asked(server, [[1, 2, 3, 4]] * rows)[0] == 200
    assert len(server.service.engines["double"].forms) <= 2
