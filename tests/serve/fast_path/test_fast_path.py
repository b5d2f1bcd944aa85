"""The fast path gives the same answers, limits and cancellation as the ordinary one."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from infer.serve.api.kserve.kserve_types import InferResponse
from infer.serve.fast_path import coalescer, header_cache
from infer.serve.fast_path.fast_request import FastRequest
from infer.serve.http.http_protocol import HttpProtocol
from infer.serve.limits import ServeLimits
from tests.support import raw_http
from tests.support.fake_predictors import Live, double, live
from tests.support.overload_clients import hang_up_behind_another
from tests.support.raw_http import (
    BODY,
    GOOD,
    Answer,
    ask,
    chunked,
    closed,
    connect,
    get,
    post,
    read,
    send,
    well,
)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the bodies that the fast path took."""
    lengths: list[int] = []
    begin = FastRequest.__init__

    def counted(self, connection, known, body, *rest):  # type: ignore[no-untyped-def]
        lengths.append(len(body))
        begin(self, connection, known, body, *rest)

    monkeypatch.setattr(FastRequest, "__init__", counted)
    return lengths


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    """Knows the template of `BODY`."""
    with live(double(), limits=raw_http.LIMITS) as server:
        answers_to(server, *[GOOD] * 2)
        yield server


def answers_to(server: Live, *requests: bytes) -> list[Answer]:
    """One after another on one connection."""
    answers, buffer = [], bytearray()
    with connect(server) as connection:
        for request in requests:
            connection.sendall(request)
            answers.append(read(connection, buffer))
    return answers


def test_the_second_request_with_a_head_is_taken_on_any_connection(server: Live, taken: list[int]) -> None:
    head = b"X-Test: first"
    answers_to(server, send(BODY, head))
    assert taken == []
    answers_to(server, send(BODY, head), send(BODY, head))
    assert taken == [len(BODY)] * 2


def test_fast_and_ordinary_path_give_equal_responses(server: Live, taken: list[int]) -> None:
    first, second = answers_to(server, *[send(BODY, b"X-Test: same")] * 2)
    assert len(taken) == 1
    assert first.status == second.status == 200
    assert list(first.headers) == list(second.headers)
    assert first.headers[b"x-request-id"] != second.headers[b"x-request-id"]
    outputs = [json.loads(one.body)["outputs"] for one in (first, second)]
    assert outputs[0] == outputs[1]


def test_a_body_after_a_known_head_is_checked_as_usual(server: Live, taken: list[int]) -> None:
    bad = BODY.replace(b"[1,4]", b"[1,5]")
    answers = answers_to(
        server, *[send(body, b"X-Test: bad") for body in (BODY, bad, b"{" * len(BODY), BODY)]
    )
    assert [one.status for one in answers] == [200, 400, 400, 200]
    assert b"holds 5 elements" in answers[1].body
    assert len(taken) == 1


def test_known_heads_with_known_templates_are_coalesced(
    server: Live, taken: list[int], resumed: list[bytes]
) -> None:
    bodies = [BODY.replace(b"[1,2,3,4]", b"[%d,2,3,4]" % number) for number in range(8)]
    answers_to(server, send(BODY, b"X-Test: together"))
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(server)) for _ in bodies]
        for client, body in zip(clients, bodies, strict=True):
            client.sendall(send(body, b"X-Test: together"))
        answers = [read(client, bytearray()) for client in clients]
    assert [json.loads(one.body)["outputs"][0]["data"][0] for one in answers] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert (len(taken), resumed) == (8, [])


def test_numbers_that_do_not_fit_are_refused_by_the_ordinary_path(server: Live, resumed: list[bytes]) -> None:
    head, texts = b"X-Test: apart", [b"[1,2,3,4]", b"[1,2,3,x]", b"[1,2],[3]", b'["2,3,45]', b"[1,2,1e99]"]
    answers_to(server, send(BODY, head))
    bodies = [BODY.replace(b"[1,2,3,4]", text.ljust(10)) for text in texts]
    answers_to(server, *[send(bodies[0], head)] * 2)
    with connect(server) as connection:
        connection.sendall(b"".join(send(body, head) for body in bodies * 2))
        buffer = bytearray()
        assert [read(connection, buffer).status for _ in bodies * 2] == [200, 400, 400, 400, 400] * 2
    assert set(resumed) == {bodies[1], bodies[3], bodies[4]}  # the other has no template


def test_an_idle_connection_holds_neither_request_nor_response(server: Live) -> None:
    def held() -> list[object]:
        cycles = [one.cycle for one in gc.get_objects() if issubclass(type(one), HttpProtocol)]
        mine = [one for one in cycles if isinstance(one, FastRequest)]
        assert mine
        return [one for one in mine if one._context or one.body or one.numbers or one.group]

    head = b"X-Test: rest"
    answers_to(server, send(BODY, head))
    with connect(server) as connection:
        connection.sendall(send(BODY, head))
        read(connection, bytearray())
        deadline = time.monotonic() + 5
        while held() and time.monotonic() < deadline:
            time.sleep(0.005)
        assert not held()


def test_a_response_equals_the_encoded_struct(server: Live) -> None:
    for known in (b"", b'"id":"\xc3\xa4\\u0022",'):
        body = answers_to(server, send(BODY.replace(b"{", b"{" + known, 1)))[0].body
        assert msgspec.json.encode(msgspec.json.decode(body, type=InferResponse)) == body


def test_a_known_head_whose_body_arrives_later_is_not_taken(server: Live, taken: list[int]) -> None:
    request = send(BODY, b"X-Test: late")
    answers_to(server, request)
    with connect(server) as connection:
        connection.sendall(request[:-3])
        time.sleep(0.05)
        connection.sendall(request[-3:])
        assert read(connection, bytearray()).status == 200
    assert taken == []


def test_requests_sent_at_once_are_answered_in_order(server: Live, taken: list[int]) -> None:
    other = BODY.replace(b"[1,2,3,4]", b"[5,6,7,8]")
    buffer = bytearray()
    answers_to(server, send(BODY, b"X-Test: many"))
    with connect(server) as connection:
        connection.sendall(b"".join(send(body, b"X-Test: many") for body in (BODY, other) * 5))
        data = [json.loads(read(connection, buffer).body)["outputs"][0]["data"] for _ in range(10)]
    assert data == [[2, 4, 6, 8], [10, 12, 14, 16]] * 5
    assert len(taken) == 10


@pytest.mark.parametrize(
    "request_",
    [
        send(BODY, b"X-Request-Id: mine"),
        send(BODY, b"Connection: close"),
        chunked(BODY),
        get(b"/v2"),
        post(b"Content-Length: %d" % len(BODY), body=BODY, version=b"1.0"),
        send(BODY, b"X-Long: " + b"a" * header_cache.MAX_HEAD_BYTES),
    ],
    ids=["its own id", "close", "chunked", "GET", "1.0", "long"],
)
def test_other_requests_are_never_taken(server: Live, taken: list[int], request_: bytes) -> None:
    assert [ask(server, request_).status for _ in range(3)] == [200] * 3
    assert taken == []


def test_a_full_header_cache_is_cleared(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header_cache, "MAX_HEADS", 3)
    answers_to(server, *[send(BODY, b"X-Number: %d" % number) for number in range(8)])
    well(server)


def test_a_disconnect_on_the_fast_path_cancels_at_once(taken: list[int]) -> None:
    with live(double(seconds=0.3, max_batch=1)) as server:
        assert [ask(server, GOOD).status for _ in range(2)] == [200] * 2
        hang_up_behind_another(server)
        deadline = time.monotonic() + 5
        while (server.service.active or len(taken) < 2) and time.monotonic() < deadline:
            time.sleep(0.005)
        assert (server.service.active, len(taken)) == (0, 2)
        assert b'code="499"' in ask(server, get(b"/metrics")).body


def test_a_draining_server_closes_after_an_answer_on_the_fast_path(taken: list[int]) -> None:
    with live(double(seconds=0.2)) as server, connect(server) as connection:
        buffer = bytearray()
        for _ in range(2):
            connection.sendall(GOOD)
            read(connection, buffer)
        connection.sendall(GOOD)
        time.sleep(0.05)
        server.service.drain()
        answer = read(connection, buffer)
        assert (answer.status, answer.headers[b"connection"]) == (200, b"close")
        assert closed(connection, 3)
        assert len(taken) == 1


def test_a_known_head_without_the_right_key_is_refused_every_time(taken: list[int]) -> None:
    with live(double(), api_key="secret") as server:
        wrong, right = send(BODY, b"Authorization: Bearer wrong"), send(BODY, b"Authorization: Bearer secret")
        requests = [wrong, right] * 3
        assert [one.status for one in answers_to(server, *requests)] == [401, 200] * 3
        assert len(taken) == 1


def test_bodies_on_the_fast_path_count_against_the_bytes_in_memory(taken: list[int]) -> None:
    with live(double(), limits=ServeLimits(max_bodies_bytes=len(BODY) + 100)) as server:
        assert [one.status for one in answers_to(server, *[GOOD] * 4)] == [200] * 4
        assert len(taken) == 2


def test_bodies_beyond_the_bytes_in_memory_are_not_taken(taken: list[int]) -> None:
    with live(double(), limits=ServeLimits(max_bodies_bytes=len(BODY) + 100)) as server:
        answers_to(server, *[GOOD] * 2)
        server.fast._bodies.held += 101
        assert answers_to(server, GOOD)[0].status == 503
        server.fast._bodies.held -= 101
        assert (answers_to(server, GOOD)[0].status, len(taken)) == (200, 1)


def test_a_server_without_the_fast_path_gives_the_same_answers() -> None:
    with live(double(), fast=False) as server:
        answers = answers_to(server, *[GOOD] * 3)
    assert [json.loads(one.body)["outputs"][0]["data"] for one in answers] == [[2, 4, 6, 8]] * 3


def test_the_ordinary_path_does_not_know_the_fast_one() -> None:
    serve = Path(coalescer.__file__).parent.parent
    known = [path.name for path in serve.rglob("*.py") if "fast_path" in path.read_text()]
    assert set(known) - {path.name for path in (serve / "fast_path").glob("*.py")} == {"server.py"}
