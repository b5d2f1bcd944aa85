"""Requests whose head came before: the same answers, limits and cancellation as on the whole way."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest

from infer.serve import heads
from infer.serve.app import Endpoint
from infer.serve.express import Express
from infer.serve.limits import ServeLimits
from infer.serve.types_v2 import InferResponse
from infer.serve.wire import Wire
from tests import rude
from tests.rude import BODY, GOOD, Answer, ask, chunked, closed, connect, get, post, read, send, well
from tests.serve_fakes import Live, double, live
from tests.serve_load import hang_up_behind_another


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the bodies that went the short way."""
    went: list[int] = []
    begin = Express.__init__

    def counted(self, wire, known, body):  # type: ignore[no-untyped-def]
        went.append(len(body))
        begin(self, wire, known, body)

    monkeypatch.setattr(Express, "__init__", counted)
    return went


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Bodies of those that went the short way, but not together with others."""
    went: list[bytes] = []
    direct = Endpoint.direct

    async def counted(self, call, *rest, **options):  # type: ignore[no-untyped-def]
        went.append(bytes(call.body))
        return await direct(self, call, *rest, **options)

    monkeypatch.setattr(Endpoint, "direct", counted)
    return went


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(double(), limits=rude.LIMITS) as server:
        yield server


def asked(server: Live, *requests: bytes) -> list[Answer]:
    """One after another on one connection."""
    answers, buffer = [], bytearray()
    with connect(server) as connection:
        for request in requests:
            connection.sendall(request)
            answers.append(read(connection, buffer))
    return answers


def test_the_second_request_with_a_head_goes_the_short_way_on_any_connection(
    server: Live, short: list[int]
) -> None:
    head = b"X-Test: first"
    asked(server, send(BODY, head))
    assert short == []
    asked(server, send(BODY, head), send(BODY, head))
    assert short == [len(BODY)] * 2


def test_both_ways_give_the_same_answer(server: Live, short: list[int]) -> None:
    first, second = asked(server, *[send(BODY, b"X-Test: same")] * 2)
    assert len(short) == 1
    assert first.status == second.status == 200
    assert list(first.headers) == list(second.headers)
    assert first.headers[b"x-request-id"] != second.headers[b"x-request-id"]
    outputs = [json.loads(one.body)["outputs"] for one in (first, second)]
    assert outputs[0] == outputs[1]


def test_a_body_behind_a_known_head_is_looked_at_as_ever(server: Live, short: list[int]) -> None:
    bad = BODY.replace(b"[1,4]", b"[1,5]")
    answers = asked(server, *[send(body, b"X-Test: bad") for body in (BODY, bad, b"{" * len(BODY), BODY)])
    assert [one.status for one in answers] == [200, 400, 400, 200]
    assert b"holds 5 elements" in answers[1].body
    assert len(short) == 3


def test_known_heads_with_known_forms_go_together(server: Live, short: list[int], alone: list[bytes]) -> None:
    bodies = [BODY.replace(b"[1,2,3,4]", b"[%d,2,3,4]" % number) for number in range(8)]
    asked(server, send(BODY, b"X-Test: together"))
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(server)) for _ in bodies]
        for client, body in zip(clients, bodies, strict=True):
            client.sendall(send(body, b"X-Test: together"))
        answers = [read(client, bytearray()) for client in clients]
    assert [json.loads(one.body)["outputs"][0]["data"][0] for one in answers] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert (len(short), alone) == (8, [])


def test_who_can_not_go_with_others_is_answered_alone(server: Live, alone: list[bytes]) -> None:
    head, texts = b"X-Test: apart", [b"[1,2,3,4]", b"[1,2,3,x]", b"[1,2],[3]", b'["2,3,4]', b"[1,2,1e99]"]
    asked(server, send(BODY, head))
    bodies = [BODY.replace(b"[1,2,3,4]", text.ljust(10)) for text in texts]
    asked(server, send(bodies[0], head))
    with connect(server) as connection:
        connection.sendall(b"".join(send(body, head) for body in bodies * 2))
        buffer = bytearray()
        assert [read(connection, buffer).status for _ in bodies * 2] == [200, 400, 400, 400, 400] * 2
    assert bodies[0] not in alone
    assert set(bodies[1:]) <= set(alone)


def test_a_connection_at_rest_holds_neither_question_nor_answer(server: Live) -> None:
    def held() -> list[object]:
        rides = [one.cycle for one in gc.get_objects() if issubclass(type(one), Wire)]
        mine = [one for one in rides if isinstance(one, Express)]
        assert mine
        return [one for one in mine if one._call or one.body or one.party]

    head = b"X-Test: rest"
    asked(server, send(BODY, head))
    with connect(server) as connection:
        connection.sendall(send(BODY, head))
        read(connection, bytearray())
        deadline = time.monotonic() + 5
        while held() and time.monotonic() < deadline:
            time.sleep(0.005)
        assert not held()


def test_an_answer_is_what_its_struct_would_be(server: Live) -> None:
    for known in (b"", b'"id":"\xc3\xa4\\u0022",'):
        body = asked(server, send(BODY.replace(b"{", b"{" + known, 1)))[0].body
        assert msgspec.json.encode(msgspec.json.decode(body, type=InferResponse)) == body


def test_a_known_head_whose_body_comes_later_goes_the_whole_way(server: Live, short: list[int]) -> None:
    request = send(BODY, b"X-Test: late")
    asked(server, request)
    with connect(server) as connection:
        connection.sendall(request[:-3])
        time.sleep(0.05)
        connection.sendall(request[-3:])
        assert read(connection, bytearray()).status == 200
    assert short == []


def test_requests_sent_at_once_are_answered_in_order(server: Live, short: list[int]) -> None:
    other = BODY.replace(b"[1,2,3,4]", b"[5,6,7,8]")
    buffer = bytearray()
    asked(server, send(BODY, b"X-Test: many"))
    with connect(server) as connection:
        connection.sendall(b"".join(send(body, b"X-Test: many") for body in (BODY, other) * 5))
        data = [json.loads(read(connection, buffer).body)["outputs"][0]["data"] for _ in range(10)]
    assert data == [[2, 4, 6, 8], [10, 12, 14, 16]] * 5
    assert len(short) == 10


@pytest.mark.parametrize(
    "request_",
    [
        send(BODY, b"X-Request-Id: mine"),
        send(BODY, b"Connection: close"),
        chunked(BODY),
        get(b"/v2"),
        post(b"Content-Length: %d" % len(BODY), body=BODY, version=b"1.0"),
        send(BODY, b"X-Long: " + b"a" * heads.LONGEST_HEAD),
    ],
    ids=["its own id", "close", "chunked", "GET", "1.0", "long"],
)
def test_other_requests_always_go_the_whole_way(server: Live, short: list[int], request_: bytes) -> None:
    assert [ask(server, request_).status for _ in range(3)] == [200] * 3
    assert short == []


def test_heads_are_forgotten_when_they_become_too_many(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "MOST_HEADS", 3)
    asked(server, *[send(BODY, b"X-Number: %d" % number) for number in range(8)])
    well(server)


def test_who_hangs_up_on_the_short_way_is_cancelled_at_once(short: list[int]) -> None:
    with live(double(seconds=0.3, max_batch=1)) as server:
        assert ask(server, GOOD).status == 200
        hang_up_behind_another(server)
        deadline = time.monotonic() + 5
        while (server.service.active or len(short) < 2) and time.monotonic() < deadline:
            time.sleep(0.005)
        assert (server.service.active, len(short)) == (0, 2)
        assert b'code="499"' in ask(server, get(b"/metrics")).body


def test_a_draining_server_closes_after_an_answer_on_the_short_way(short: list[int]) -> None:
    with live(double(seconds=0.2)) as server, connect(server) as connection:
        buffer = bytearray()
        connection.sendall(GOOD)
        read(connection, buffer)
        connection.sendall(GOOD)
        time.sleep(0.05)
        server.service.drain()
        answer = read(connection, buffer)
        assert (answer.status, answer.headers[b"connection"]) == (200, b"close")
        assert closed(connection, 3)
        assert len(short) == 1


def test_a_known_head_without_the_right_key_is_refused_every_time(short: list[int]) -> None:
    with live(double(), api_key="secret") as server:
        wrong, right = send(BODY, b"Authorization: Bearer wrong"), send(BODY, b"Authorization: Bearer secret")
        assert [one.status for one in asked(server, wrong, right, wrong, right)] == [401, 200, 401, 200]
        assert len(short) == 2


def test_bodies_on_the_short_way_count_against_the_bytes_in_memory(short: list[int]) -> None:
    with live(double(), limits=ServeLimits(max_bodies_bytes=len(BODY) + 100)) as server:
        assert [one.status for one in asked(server, *[GOOD] * 4)] == [200] * 4
        assert len(short) == 3
