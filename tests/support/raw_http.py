"""Raw sockets against a real server: how to ask, what a good answer is, and a server of every kind of model.

`python [-O] -m tests.support.raw_http FOLDER` serves it until its standard input ends.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from infer.serve.limits import ServeLimits
from infer.spec import TensorSpec
from tests.support.fake_llm import FakeLLMPredictor
from tests.support.fake_predictors import Fake, Live, double, embedder, live

ROOT = Path(__file__).resolve().parents[2]
PATH = b"/v2/models/double/infer"
BODY = json.dumps(
    {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]},
    separators=(",", ":"),
).encode()
LIMITS = ServeLimits(
    header_seconds=0.5,
    body_seconds=0.5,
    keep_alive_seconds=2,
    max_body_bytes=100_000,
    max_json_bytes=50_000,
    max_chunks=500,
)


def get(path: bytes = b"/health", *headers: bytes, method: bytes = b"GET") -> bytes:
    return b"\r\n".join([method + b" " + path + b" HTTP/1.1", b"Host: a", *headers, b"", b""])


def post(*headers: bytes, body: bytes = b"", path: bytes = PATH, version: bytes = b"1.1") -> bytes:
    """Build a request without headers but Host and those given."""
    return b"\r\n".join([b"POST " + path + b" HTTP/" + version, b"Host: a", *headers, b"", b""]) + body


def send(body: bytes, *headers: bytes, path: bytes = PATH) -> bytes:
    """Build a POST request with the right Content-Length."""
    return post(b"Content-Length: %d" % len(body), *headers, body=body, path=path)


def chunked(*chunks: bytes, tail: bytes = b"0\r\n\r\n", path: bytes = PATH) -> bytes:
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + tail
    return post(b"Transfer-Encoding: chunked", body=body, path=path)


GOOD, HEALTH = send(BODY), get()


@contextlib.contextmanager
def connect(server: Any, timeout: float = 10) -> Iterator[socket.socket]:
    with socket.create_connection((server.host, server.port), timeout=timeout) as connection:
        yield connection


class Answer:
    def __init__(self, status: int, headers: dict[bytes, bytes], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body


def read(connection: socket.socket, buffer: bytearray, *, head: bool = False) -> Answer:
    """Read the next response on this connection; following bytes stay in `buffer`. `head`: of a HEAD request."""
    while b"\r\n\r\n" not in buffer:
        chunk = connection.recv(65536)
        assert chunk, f"closed without an answer after {bytes(buffer)!r}"
        buffer += chunk
    top, _, rest = bytes(buffer).partition(b"\r\n\r\n")
    lines = top.split(b"\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])}
    size = 0 if head else int(headers[b"content-length"])
    while len(rest) < size:
        chunk = connection.recv(65536)
        assert chunk
        rest += chunk
    buffer[:] = rest[size:]
    return Answer(int(lines[0].split()[1]), headers, rest[:size])


def ask(server: Any, *pieces: bytes) -> Answer:
    with connect(server) as connection:
        for piece in pieces:
            connection.sendall(piece)
        return read(connection, bytearray(), head=pieces[0].startswith(b"HEAD"))


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


def well(server: Any) -> None:
    """Check that the server lives and returns right numbers."""
    assert ask(server, HEALTH).body == b'{"status":"ok"}'
    answer = ask(server, GOOD)
    assert answer.status == 200
    assert json.loads(answer.body)["outputs"][0]["data"] == [2.0, 4.0, 6.0, 8.0]


def idle(server: Any, seconds: float = 5) -> bool:
    """Nothing runs, waits or is being answered; the scrape itself is not counted by these gauges."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        text = ask(server, get(b"/metrics")).body.decode()
        found = re.findall(r"^infer_requests_(?:running|waiting)\{.*\} (\S+)$", text, re.MULTILINE)
        if found and not any(map(float, found)):
            return True
        time.sleep(0.01)
    return False


def wild() -> Fake:
    """One value in, NaN, infinity and minus infinity out."""
    specs = TensorSpec("x", "float32", ("batch", 1)), TensorSpec("y", "float32", ("batch", 3))
    values = np.array([[np.nan, np.inf, -np.inf]], np.float32)
    return Fake("wild", specs[:1], specs[1:], lambda given: {"y": values.repeat(len(given["x"]), 0)})


def wide(dtype: str) -> Fake:
    specs = TensorSpec("x", dtype, ("batch", 2)), TensorSpec("y", dtype, ("batch", 2))
    return Fake(dtype, specs[:1], specs[1:], lambda inputs: {"y": inputs["x"]})


def models(folder: Path) -> Sequence[Any]:
    named = [wide(dtype) for dtype in ("int8", "bool", "float16")]
    return double(), embedder(), wild(), *named, FakeLLMPredictor(folder)


@contextlib.contextmanager
def process(folder: Path, *options: str) -> Iterator[Live]:
    """Run a server in a process of its own, `python OPTIONS`."""
    command = [sys.executable, *options, "-m", "tests.support.raw_http", str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as running:  # type: ignore[call-overload]
        line = running.stdout.readline()
        assert line, running.stderr.read()
        host, port = line.split()
        try:
            yield Live(host=host, port=int(port), url=f"http://{host}:{port}")
        finally:
            running.stdin.close()
            said = running.stderr.read()
            running.wait(20)
        assert "Traceback" not in said, said


def reset(connection: socket.socket) -> None:
    """Close it with RST."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


if __name__ == "__main__":
    with live(*models(Path(sys.argv[1])), limits=LIMITS) as server:
        print(server.host, server.port, flush=True)
        sys.stdin.read()
