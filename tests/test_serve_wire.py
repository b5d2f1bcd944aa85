"""Raw sockets: bad framing, rude and slow clients. After every one the server is well and answers right."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator

import pytest

from infer.serve.limits import ServeLimits
from tests.serve_fakes import Live, double, live

BODY = json.dumps(
    {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]},
    separators=(",", ":"),
).encode()
PATH = b"/v2/models/double/infer"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
REQUEST = b"POST " + PATH + b" HTTP/1.1\r\nHost: a\r\n" + LENGTH + b"\r\n" + BODY
HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    limits = ServeLimits(header_seconds=0.4, body_seconds=0.4, keep_alive_seconds=2, max_body_bytes=100_000)
    with live(double(), limits=limits) as server:
        yield server


@contextlib.contextmanager
def connect(server: Live) -> Iterator[socket.socket]:
    with socket.create_connection((server.host, server.port), timeout=5) as connection:
        yield connection


def read_answer(connection: socket.socket, buffer: bytearray) -> tuple[int, bytes]:
    """Status and body of the next answer on this connection; what follows stays in `buffer`."""
    while b"\r\n\r\n" not in buffer:
        chunk = connection.recv(65536)
        assert chunk, f"closed without an answer after {bytes(buffer)!r}"
        buffer += chunk
    head, _, rest = bytes(buffer).partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])}
    size = int(headers[b"content-length"])
    while len(rest) < size:
        chunk = connection.recv(65536)
        assert chunk
        rest += chunk
    buffer[:] = rest[size:]
    return int(lines[0].split()[1]), rest[:size]


def ask(server: Live, *pieces: bytes) -> tuple[int, bytes]:
    with connect(server) as connection:
        for piece in pieces:
            connection.sendall(piece)
        return read_answer(connection, bytearray())


def closed(connection: socket.socket, within: float) -> bool:
    connection.settimeout(within)
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


@pytest.fixture(autouse=True)
def still_well(server: Live) -> Iterator[None]:
    yield
    assert ask(server, HEALTH) == (200, b'{"status":"ok"}')
    status, body = ask(server, REQUEST)
    assert status == 200
    assert json.loads(body)["outputs"][0]["data"] == [2.0, 4.0, 6.0, 8.0]
    deadline = time.monotonic() + 5
    while not server.service.idle and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.service.idle


def post(*headers: bytes, body: bytes = b"", path: bytes = PATH, version: bytes = b"1.1") -> bytes:
    return b"\r\n".join([b"POST " + path + b" HTTP/" + version, b"Host: a", *headers, b"", b""]) + body


@pytest.mark.parametrize(
    "request_",
    [
        b"\x00\x01\x02\x03\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"NONSENSE / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        post(b"Content-Length: abc"),
        post(b"Content-Length: -5"),
        post(b"Content-Length: +5", body=b"12345"),
        post(b"Content-Length: 1", b"Content-Length: 2", body=b"12"),
        post(b"Content-Length: 99999999999999999999999"),
        post(b"Content-Length: 5", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
        post(b"Transfer-Encoding: chunked", b"Content-Length: 5", body=b"0\r\n\r\n"),
        post(b"Transfer-Encoding : chunked", body=b"0\r\n\r\n"),
        post(b"X: a\r\n folded: b"),
        post(b"X: a\nY: b", b"Bad Header: 1"),
        post(b"Transfer-Encoding: chunked", body=b"zz\r\n\r\n"),
        post(b"Transfer-Encoding: chunked", body=b"3\r\nabcXX0\r\n\r\n"),
        post(b"Transfer-Encoding: chunked", body=b"ffffffffffffffffff\r\n"),
    ],
)
def test_bad_framing_is_answered_400_and_the_connection_closed(server: Live, request_: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(request_)
        status, body = read_answer(connection, bytearray())
        assert status == 400
        assert "error" in json.loads(body)
        assert closed(connection, 3)


def test_a_target_too_long_is_414(server: Live) -> None:
    assert ask(server, b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: a\r\n\r\n")[0] == 414


@pytest.mark.parametrize(
    "headers",
    [b"X: 1\r\n" * 101, b"X: " + b"a" * 40_000 + b"\r\n", b"X: " + b"a" * 40_000],
    ids=["many", "long", "endless"],
)
def test_too_many_or_too_long_headers_are_431(server: Live, headers: bytes) -> None:
    assert ask(server, b"GET /health HTTP/1.1\r\nHost: a\r\n" + headers + b"\r\n")[0] == 431


def test_a_request_without_content_type_is_taken(server: Live) -> None:
    assert ask(server, REQUEST)[0] == 200


@pytest.mark.parametrize("size", [1, 7, 50])
def test_a_request_may_come_in_pieces_of_any_size(server: Live, size: int) -> None:
    assert ask(server, *(REQUEST[i : i + size] for i in range(0, len(REQUEST), size)))[0] == 200


def test_a_chunked_body_is_put_together(server: Live) -> None:
    chunks = b"".join(
        b"%x\r\n%s\r\n" % (len(BODY[i : i + 9]), BODY[i : i + 9]) for i in range(0, len(BODY), 9)
    )
    assert ask(server, post(b"Transfer-Encoding: chunked", body=chunks + b"0\r\n\r\n"))[0] == 200


def test_a_connection_is_kept_for_the_next_request_whatever_the_answer(server: Live) -> None:
    with connect(server) as connection:
        buffer = bytearray()
        for request_, status in [
            (REQUEST, 200),
            (HEALTH, 200),
            (post(LENGTH[:-2], body=BODY[::-1]), 400),
            (REQUEST, 200),
        ]:
            connection.sendall(request_)
            assert read_answer(connection, buffer)[0] == status


def test_two_requests_in_one_write_are_answered_in_order(server: Live) -> None:
    with connect(server) as connection:
        buffer = bytearray()
        connection.sendall(REQUEST + HEALTH + REQUEST)
        bodies = [read_answer(connection, buffer) for _ in range(3)]
        assert [status for status, _ in bodies] == [200, 200, 200]
        assert bodies[1][1] == b'{"status":"ok"}'


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_old_clients_and_closing_clients_are_let_go(server: Live, version: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/" + version + b"\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert read_answer(connection, bytearray())[0] == 200
        assert closed(connection, 3)


def test_expect_continue_is_answered_before_the_body(server: Live) -> None:
    with connect(server) as connection:
        connection.sendall(post(b"Expect: 100-continue", LENGTH[:-2]))
        assert connection.recv(100).startswith(b"HTTP/1.1 100")
        connection.sendall(BODY)
        assert read_answer(connection, bytearray())[0] == 200


def test_a_declared_body_above_the_limit_is_413_before_it_is_read(server: Live) -> None:
    assert ask(server, post(b"Content-Length: 100001"))[0] == 413


def test_a_body_that_never_comes_is_408_in_time(server: Live) -> None:
    began = time.monotonic()
    assert ask(server, post(LENGTH[:-2], body=BODY[:10]))[0] == 408
    assert 0.3 < time.monotonic() - began < 2


def test_a_body_that_trickles_is_408_however_often_it_moves(server: Live) -> None:
    with connect(server) as connection:
        connection.sendall(post(LENGTH[:-2]))
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            for byte in BODY[:20]:
                connection.sendall(bytes([byte]))
                time.sleep(0.05)
                if time.monotonic() - began > 0.6:
                    break
        assert read_answer(connection, bytearray())[0] == 408


def test_headers_that_trickle_are_408_and_silence_is_closed(server: Live) -> None:
    with connect(server) as slow, connect(server) as silent:
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            for byte in HEALTH[:-1]:
                slow.sendall(bytes([byte]))
                time.sleep(0.03)
        assert time.monotonic() - began > 0.4
        assert read_answer(slow, bytearray())[0] == 408
        assert closed(silent, 3)


@pytest.mark.parametrize("sent", [1, 30, len(REQUEST) - 5, len(REQUEST)])
def test_a_client_that_hangs_up_leaves_nothing_behind(server: Live, sent: int) -> None:
    for reset in (False, True):
        with connect(server) as connection:
            connection.sendall(REQUEST[:sent])
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")


def test_a_client_that_hangs_up_is_cancelled_while_it_waits() -> None:
    with live(double(seconds=0.3, max_batch=1)) as server:
        engine = server.service.engines["double"]
        with connect(server) as first, connect(server) as second:
            first.sendall(REQUEST)
            time.sleep(0.05)
            second.sendall(REQUEST)
            time.sleep(0.05)
            assert engine.batcher.requests == 1
            second.close()
            deadline = time.monotonic() + 0.2
            while engine.batcher.requests and time.monotonic() < deadline:
                time.sleep(0.005)
            assert engine.batcher.requests == 0
            assert read_answer(first, bytearray())[0] == 200
        assert engine.predictor.batches == [1]
        text = ask(server, b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")[1].decode()
        assert 'infer_cancelled_total{model="double",stage="queued",version="1"} 1.0' in text
        assert 'code="499"' in text


def test_connections_above_the_limit_are_told_503_and_those_beyond_are_reset() -> None:
    limits = ServeLimits(max_connections=3, spare_connections=2)
    with live(double(), limits=limits) as server, contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(server)) for _ in range(6)]
        for connection in connections[:3]:
            connection.sendall(REQUEST)
            assert read_answer(connection, bytearray())[0] == 200
        connections[3].sendall(REQUEST)
        status, body = read_answer(connections[3], bytearray())
        assert (status, json.loads(body)) == (503, {"error": "too many connections are open"})
        assert closed(connections[3], 3)
        connections[4].sendall(HEALTH)
        assert read_answer(connections[4], bytearray())[0] == 200
        assert closed(connections[4], 3)
        assert closed(connections[5], 3)
        connections[0].sendall(REQUEST)
        assert read_answer(connections[0], bytearray())[0] == 200
