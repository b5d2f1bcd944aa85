"""Event loop time of one streamed token: fan-out, waking the reader, the event's bytes, the write.

    python -m bench.serve.stream_cost [STREAMS] [STEPS]

The model is a stand-in that costs nothing; the app runs in process, under uvicorn's own connection class, whose
transport swallows bytes. Compared with what the simplest server would do: json.dumps of each event.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from uvicorn.server import ServerState

from infer.llm.engine.requests import Output, Request
from infer.serve.http import http_protocol
from infer.serve.http.app import build
from infer.serve.service import Service
from tests.support.fake_llm import FakeLLMPredictor

PATHS = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9},
}


class DiscardTransport(asyncio.Transport):
    """Transport that takes everything at once."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.writes = self.bytes = 0
        self.last = b""

    def write(self, data: Any) -> None:
        self.writes += 1
        self.bytes += len(data)
        self.last = bytes(data)

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...


class ManualEngine:
    """Driver whose steps are made by the benchmark."""

    def __init__(self, engine_client: Any) -> None:
        self.failure, self.ready, self.pid, self.stats, self.close = (
            None,
            True,
            None,
            engine_client.stats,
            engine_client.close,
        )
        self.requests: list[tuple[Request, Callable[[list[Output]], None]]] = []

    @property
    def beat(self) -> float:
        return time.monotonic()

    def submit(self, request: Request, deliver: Callable[[list[Output]], None], *, replay: bool) -> None:
        self.requests.append((request, deliver))

    def cancel(self, request_id: str) -> None: ...


async def measure(path: str, streams: int, steps: int) -> tuple[float, float]:
    """Return microseconds of the event loop, and bytes, for each streamed event."""
    fake_llm = FakeLLMPredictor(Path(tempfile.mkdtemp()))
    language_model: Any = fake_llm.language_model
    language_model.engine_client = held = ManualEngine(language_model.engine_client)
    service = Service([fake_llm])
    config = uvicorn.Config(build(service), **http_protocol.uvicorn_options(service.limits, service.refused))
    config.load()
    service.start()
    body = json.dumps({"model": "fake_llm", "stream": True, **PATHS[path]}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    sinks = [DiscardTransport() for _ in range(streams)]
    for sink in sinks:
        connection = config.http_protocol_class(config=config, server_state=ServerState(), app_state={})
        connection.connection_made(sink)
        connection.data_received(head + body)
    while len(held.requests) < streams:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)
    for step in range(steps + 20):
        if step == 20:  # warm
            before, began = sum(sink.writes for sink in sinks), time.perf_counter()
            size = sum(sink.bytes for sink in sinks)
        finish = "length" if step == steps + 19 else None
        for request, deliver in held.requests:
            deliver([Output(id=request.id, index=0, token_ids=(101,), text=" word", finish=finish)])
        written = sum(sink.writes for sink in sinks)
        while sum(sink.writes for sink in sinks) < written + streams:
            await asyncio.sleep(0)
    seconds = time.perf_counter() - began
    await asyncio.sleep(0.05)
    events = streams * steps
    assert sum(sink.writes for sink in sinks) - before >= events
    assert all(sink.last.endswith(b"0\r\n\r\n") for sink in sinks)
    total = sum(sink.bytes for sink in sinks) - size
    service.stop()
    fake_llm.close()
    return seconds / events * 1e6, total / events


def plain(steps: int) -> float:
    """Return microseconds of json.dumps of one event."""
    event = {
        **{"id": "cmpl-0123456789abcdef01234567", "object": "text_completion", "created": 1790000000},
        **{"model": "fake_llm", "system_fingerprint": "infer-0123456789ab"},
        "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None}],
    }
    began = time.perf_counter()
    for _ in range(steps):
        f"data: {json.dumps(event)}\n\n".encode()
    return (time.perf_counter() - began) / steps * 1e6


def main() -> None:
    streams, steps = (int(arg) for arg in (*sys.argv[1:], *("32", "400")[len(sys.argv) - 1 :]))
    print(f"{streams} streams, {steps} steps; json.dumps of one event alone: {plain(20_000):.1f} µs")
    for path in PATHS:
        for _ in range(2):
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                cost, size = runner.run(measure(path, streams, steps))
            print(f"{path:24} {cost:6.1f} µs and {size:5.0f} bytes an event")


if __name__ == "__main__":
    main()
