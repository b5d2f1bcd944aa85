"""Closed-loop client: one process, N keep-alive connections, one outstanding request on each."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from typing import Any

import numpy as np
import psutil

HIGHEST = 20_000  # requests a run may hold
TOGETHER = 12  # that are checked
LONGEST = 120.0  # seconds a run may take


class Connection(asyncio.Protocol):
    """One keep-alive connection: a request in one write, the body of its answer out."""

    def connection_made(self, transport: Any) -> None:
        self.transport, self.buffer = transport, bytearray()
        self.answer: asyncio.Future[tuple[bytes, bytes]] | None = None

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0 or self.answer is None:
            return
        head = bytes(self.buffer[:end]).lower()
        size = int(head.partition(b"\r\ncontent-length:")[2].split(b"\r\n")[0])
        if len(self.buffer) >= end + 4 + size:
            body = bytes(self.buffer[end + 4 : end + 4 + size])
            del self.buffer[: end + 4 + size]
            self.answer.set_result((head, body))

    def connection_lost(self, error: Exception | None) -> None:
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(error or ConnectionError("the server hung up"))

    async def ask(self, request: bytes) -> tuple[bytes, bytes]:
        self.answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self.answer


async def drive(port: int, requests: list[bytes], clients: int, count: int) -> list[float]:
    """Return the seconds of each of `count` requests from `clients` connections. Every status must be 200."""
    loop, seconds, left = asyncio.get_running_loop(), list[float](), iter(range(min(count, HIGHEST)))

    async def client() -> None:
        _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
        for index in left:
            began = time.perf_counter()
            head, body = await connection.ask(requests[index % len(requests)])
            seconds.append(time.perf_counter() - began)
            if not head.startswith(b"http/1.1 200"):
                raise SystemExit(f"refused: {head!r} {body[:300]!r}")
        connection.transport.close()

    await asyncio.wait_for(asyncio.gather(*(client() for _ in range(clients))), LONGEST)
    return seconds


def run(port: int, requests: list[bytes], clients: int, count: int) -> dict[str, float]:
    import uvloop

    began = time.perf_counter()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        seconds = sorted(runner.run(drive(port, requests, clients, count)))
    spent = time.perf_counter() - began
    return {
        "rate": len(seconds) / spent,
        "p50_ms": 1e3 * seconds[len(seconds) // 2],
        "p99_ms": 1e3 * seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))],
    }


def timed(
    server: tuple[int, subprocess.Popen[str]], requests: list[bytes], clients: int, count: int
) -> dict[str, float]:
    """Time one run, with the milliseconds of CPU that the server itself spent per request."""
    process = psutil.Process(server[1].pid)
    processes = [process, *process.children(recursive=True)]
    before = sum(sum(one.cpu_times()[:2]) for one in processes)
    figures = run(server[0], requests, clients, count)
    spent = sum(sum(one.cpu_times()[:2]) for one in processes) - before
    return {**figures, "cpu_ms": 1e3 * spent / count}


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def encode(name: str, arrays: dict[str, np.ndarray]) -> dict[str, bytes]:
    """Encode one request in every form: KServe JSON, KServe binary, the plain endpoint's JSON."""
    from infer.serve.api.kserve.kserve_tensors import DATATYPES

    path, media = f"/v2/models/{name}/infer", "Content-Type: application/json"
    inputs = [
        {"name": n, "datatype": DATATYPES[str(a.dtype)][0], "shape": list(a.shape)} for n, a in arrays.items()
    ]
    plain = [{**i, "data": a.ravel().tolist()} for i, a in zip(inputs, arrays.values(), strict=True)]
    sized = [
        {**i, "parameters": {"binary_data_size": a.nbytes}}
        for i, a in zip(inputs, arrays.values(), strict=True)
    ]
    head = json.dumps({"inputs": sized, "parameters": {"binary_data_output": True}}).encode()
    raw = head + b"".join(a.tobytes() for a in arrays.values())
    naive = {"inputs": {n: a.tolist() for n, a in arrays.items()}}
    return {
        "json": post(path, json.dumps({"inputs": plain}).encode(), media),
        "binary": post(path, raw, f"Inference-Header-Content-Length: {len(head)}"),
        "naive": post("/predict", json.dumps(naive).encode(), media),
    }


def outputs_of(form: str, head: bytes, body: bytes) -> np.ndarray:
    """Return the first output of an answer, flat."""
    if form == "naive":
        return np.array(next(iter(json.loads(body).values())), np.float32).ravel()
    if form == "json":
        return np.array(json.loads(body)["outputs"][0]["data"], np.float32)
    size = int(head.partition(b"inference-header-content-length:")[2].split(b"\r\n")[0])
    first = json.loads(body[:size])["outputs"][0]
    return np.frombuffer(body[size : size + first["parameters"]["binary_data_size"]], "<f4")


async def answers(port: int, form: str, requests: list[bytes]) -> list[np.ndarray]:
    """Send several requests together, so that batching is checked too, but not enough to be refused."""
    loop, together = asyncio.get_running_loop(), asyncio.Semaphore(TOGETHER)

    async def one(request: bytes) -> np.ndarray:
        async with together:
            _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
            head, body = await connection.ask(request)
            connection.transport.close()
        return outputs_of(form, head, body)

    return await asyncio.gather(*(one(request) for request in requests))


def check(port: int, form: str, requests: list[bytes], expected: np.ndarray) -> None:
    """Refuse to time a server whose answers differ from the model's."""
    for got, want in zip(asyncio.run(answers(port, form, requests)), expected, strict=True):
        error = np.linalg.norm(got - want.ravel()) / max(float(np.linalg.norm(want)), 1e-9)
        if got.size != want.size or not error < 1e-3:
            raise SystemExit(f"{form}: the server's answer is not the model's (relative error {error:.2e})")
