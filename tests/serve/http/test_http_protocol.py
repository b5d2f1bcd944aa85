"""HTTP over raw sockets: fragmented requests, slow senders and slow readers."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterable, Iterator

import numpy as np
import pytest

from infer.serve.limits import ServeLimits
from infer.spec import TensorSpec
from tests.support import raw_http
from tests.support.fake_predictors import Fake, Live, double, live
from tests.support.overload_clients import hang_up_behind_another
from tests.support.raw_http import (
    BODY,
    GOOD,
    HEALTH,
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

LENGTH = b"Content-Length: %d" % len(BODY)


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(double(), limits=raw_http.LIMITS) as server:
        yield server


def test_a_request_without_content_type_is_accepted(server: Live) -> None:
    assert ask(server, GOOD).status == 200


@pytest.mark.parametrize("size", [1, 7, 50])
def test_a_request_may_arrive_in_pieces_of_any_size(server: Live, size: int) -> None:
    assert ask(server, *(GOOD[i : i + size] for i in range(0, len(GOOD), size))).status == 200


def slowly(server: Live, pieces: Iterable[bytes]) -> Answer:
    """Send each piece as a packet of its own."""
    with connect(server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(0.01)
        return read(connection, bytearray())


@pytest.mark.parametrize("cut", range(9))
def test_an_upgrade_header_may_arrive_in_two_pieces(server: Live, cut: int) -> None:
    request = send(BODY, b"Connection: Upgrade, HTTP2-Settings", b"uPgrade: h2c", b"X: b")
    at = request.index(b"uPgrade") + cut
    assert slowly(server, [request[:at], request[at:]]).status == 200


def test_a_head_with_an_upgrade_may_arrive_byte_by_byte(server: Live) -> None:
    request = get(b"/health", b"Connection: Upgrade", b"Upgrade: h2c", b"Up: b", b"Upgraded: c")
    at = request.index(b"Upgrade: ")
    pieces = [request[:at], *(request[i : i + 1] for i in range(at, len(request)))]
    assert slowly(server, pieces).status == 200


@pytest.mark.parametrize("cut", [4, 5, 12, 13])
def test_two_spaces_in_a_request_line_are_seen_across_pieces(server: Live, cut: int) -> None:
    for request in (HEALTH.replace(b"GET ", b"GET  "), HEALTH.replace(b" HTTP", b"  HTTP")):
        assert slowly(server, [request[:cut], request[cut:]]).status == 400


def test_a_chunked_body_is_joined(server: Live) -> None:
    assert ask(server, chunked(*(BODY[i : i + 9] for i in range(0, len(BODY), 9)))).status == 200


@pytest.mark.parametrize("size", [1, 2, 3, 11])
def test_a_chunked_body_may_arrive_in_pieces_of_any_size(server: Live, size: int) -> None:
    whole = chunked(*(BODY[i : i + 9] for i in range(0, len(BODY), 9))) + GOOD
    with connect(server) as connection:
        buffer = bytearray()
        for i in range(0, len(whole), size):
            connection.sendall(whole[i : i + size])
        assert [read(connection, buffer).status for _ in range(2)] == [200, 200]


def test_a_connection_is_kept_after_any_response(server: Live) -> None:
    with connect(server) as connection:
        buffer = bytearray()
        for request_, status in [
            (GOOD, 200),
            (HEALTH, 200),
            (post(LENGTH, body=BODY[::-1]), 400),
            (GOOD, 200),
        ]:
            connection.sendall(request_)
            assert read(connection, buffer).status == status


def test_expect_continue_is_answered_before_the_body(server: Live) -> None:
    with connect(server) as connection:
        connection.sendall(post(b"Expect: 100-continue", LENGTH))
        assert connection.recv(100).startswith(b"HTTP/1.1 100")
        connection.sendall(BODY)
        assert read(connection, bytearray()).status == 200


def test_a_disconnect_cancels_a_waiting_request() -> None:
    with live(double(seconds=0.3, max_batch=1)) as server:
        engine = server.service.engines["double"]
        hang_up_behind_another(server)
        assert engine.model.batches == [1]
        text = ask(server, get(b"/metrics")).body.decode()
        assert 'infer_cancelled_total{model="double",stage="queued",version="1"} 1.0' in text
        assert 'code="499"' in text


def test_connections_above_the_limit_get_503_and_further_ones_a_reset() -> None:
    limits = ServeLimits(max_connections=3, spare_connections=2)
    with live(double(), limits=limits) as server, contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(server)) for _ in range(6)]
        for connection in connections[:3]:
            connection.sendall(GOOD)
            assert read(connection, bytearray()).status == 200
        connections[3].sendall(GOOD)
        answer = read(connections[3], bytearray())
        assert (answer.status, json.loads(answer.body)) == (503, {"error": "too many connections are open"})
        assert closed(connections[3], 3)
        connections[4].sendall(HEALTH)
        assert read(connections[4], bytearray()).status == 200
        assert closed(connections[4], 3)
        assert closed(connections[5], 3)
        connections[0].sendall(GOOD)
        assert read(connections[0], bytearray()).status == 200


def test_a_body_below_the_minimum_rate_is_408_before_its_deadline() -> None:
    limits = ServeLimits(body_seconds=60, grace_seconds=0.3, min_bytes_per_second=4000)
    with live(double(), limits=limits) as server, connect(server) as slow, connect(server) as steady:
        for connection in (slow, steady):
            connection.sendall(post(b"Content-Length: 30000"))
        for _ in range(20):
            steady.sendall(b" " * 1500)
            with contextlib.suppress(ConnectionError):
                slow.sendall(b" " * 10)
            time.sleep(0.04)
        assert read(slow, bytearray()).status == 408
        assert closed(slow, 3)
        assert read(steady, bytearray()).status == 400  # 30,000 spaces are no JSON
        well(server)


def big() -> Fake:
    """Eight megabytes for every request."""
    specs = TensorSpec("x", "float32", ("batch", 4)), TensorSpec("y", "float32", ("batch", 2_000_000))
    return Fake(
        "big", specs[:1], specs[1:], lambda given: {"y": np.ones((len(given["x"]), 2_000_000), np.float32)}
    )


BIG = json.dumps({**json.loads(BODY), "parameters": {"binary_data_output": True}}).encode()


def test_a_client_that_stops_reading_is_aborted_a_slow_one_is_not() -> None:
    limits = ServeLimits(send_seconds=0.3, keep_alive_seconds=1)
    request = send(BIG, path=b"/v2/models/big/infer")
    with live(double(), big(), limits=limits) as server, contextlib.ExitStack() as stack:
        deaf, slow = (stack.enter_context(connect(server)) for _ in range(2))
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)
        for connection in (deaf, slow):
            connection.sendall(request)
        got, began = 0, time.monotonic()
        while got < 8_000_000:
            got += len(slow.recv(200_000))
            time.sleep(0.02)
        assert time.monotonic() - began > 0.6
        time.sleep(0.3)
        left = 0
        with contextlib.suppress(ConnectionError):
            while piece := deaf.recv(1_000_000):
                left += len(piece)
        assert left < 8_000_000
        well(server)


def test_an_unread_small_response_does_not_keep_its_connection() -> None:
    limits = ServeLimits(send_seconds=0.2, keep_alive_seconds=1)
    with live(double(), limits=limits) as server, connect(server) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        with contextlib.suppress(ConnectionError, TimeoutError):
            deaf.settimeout(0.5)
            for _ in range(20_000):
                deaf.sendall(HEALTH * 50)
        deadline = time.monotonic() + 10
        while server.service.active and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not server.service.active
        well(server)


def test_all_bodies_together_are_bounded_while_they_arrive() -> None:
    limits = ServeLimits(max_bodies_bytes=100_000)
    with live(double(), limits=limits) as server, contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(connect(server)) for _ in range(2))
        first.sendall(post(b"Content-Length: 90000", body=b" " * 80_000))
        second.sendall(post(b"Content-Length: 90000"))
        assert ask(server, GOOD).status == 200, "announced bytes count for nothing"
        time.sleep(0.1)
        second.sendall(b" " * 80_000)
        answer = read(second, bytearray())
        assert answer.status == 503
        assert answer.headers[b"retry-after"] == b"1"
        first.close()
        deadline = time.monotonic() + 5
        while ask(server, send(b" " * 90_000)).status != 400 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert ask(server, send(b" " * 90_000)).status == 400
        well(server)


def test_half_open_connections_are_closed_and_do_not_delay_others() -> None:
    """Slowloris: hundreds of requests that never end, while others ask and are answered."""
    limits = ServeLimits(header_seconds=1.5, max_connections=400)
    with live(double(), limits=limits) as server, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(server)) for _ in range(300)]
        for index, connection in enumerate(slow):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nX: "[: 1 + index % 40])
        answers: list[int] = []
        stop = threading.Event()

        def trickle() -> None:
            while not stop.wait(0.2):
                for connection in slow:
                    with contextlib.suppress(OSError):
                        connection.sendall(b"a")

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            with connect(server) as good:
                buffer = bytearray()
                for _ in range(200):
                    good.sendall(GOOD)
                    answers.append(read(good, buffer).status)
            assert answers == [200] * 200
            assert all(closed(connection, 10) for connection in slow)
        finally:
            stop.set()
            thread.join()
        well(server)


def test_a_misbehaving_client_leaks_no_memory() -> None:
    """A hundred requests of 3,000 chunks each; were they kept, they would be tens of megabytes."""
    import psutil

    one = chunked(*[b" " * 8] * 3_000)
    with live(double()) as server:
        for _ in range(20):
            assert ask(server, one).status == 400
        before = psutil.Process().memory_info().rss
        for _ in range(100):
            ask(server, one)
        assert psutil.Process().memory_info().rss - before < 4 << 20
        well(server)
