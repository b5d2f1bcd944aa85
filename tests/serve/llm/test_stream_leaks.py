"""Streams closed early leak no pages, tasks, files, threads or objects; a leak is detected."""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infer.llm.engine.cache.block_manager import BlockManager
from infer.llm.engine.engine import Engine
from infer.llm.engine.engine_thread import EngineThread
from infer.llm.engine.scheduling.engine_limits import EngineLimits
from infer.serve.batching.infer_result import InferResult, PendingResult
from infer.serve.batching.queue_items import QueueItem
from infer.serve.http.http_protocol import HttpProtocol
from infer.serve.llm.token_stream import TokenStream
from tests.support.fake_llm import FakeLanguageModel, FakeLLMPredictor
from tests.support.fake_predictors import Live, double, live
from tests.support.fake_step import EOS, FakeStep, fake_shape
from tests.support.raw_http import BODY, get, read, reset, send

pytestmark = pytest.mark.chaos
STREAMS, WARM = 150, 30
# when nobody asks
EMPTY = ("pages", "sequences", "requests of the engine thread", "streams", "waiting", "active", "body bytes")


class Slow(FakeStep):
    """So that there is something to hang up on."""

    def run(self, inputs: Any) -> Any:
        time.sleep(0.001)
        return super().run(inputs)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Live, Engine]]:
    """Real pages, scheduler and engine thread under a step that looks what is in the pages."""
    shape = fake_shape()
    limits = EngineLimits(step_tokens=64, mixed_tokens=32, max_running=8)
    engine = Engine(
        Slow(), shape, tokenizer=None, eos_ids=[EOS], kv_bytes=200 * 2 * shape.page_bytes, limits=limits
    )
    fake_llm = FakeLLMPredictor(tmp_path, context=256)
    fake_llm.close()
    fake_llm.language_model = FakeLanguageModel(EngineThread(engine), tmp_path, context=256)
    fake_llm.language_model.vocab_size = 61
    with live(fake_llm) as server:
        yield server, engine


def hang_up(server: Live, rng: random.Random) -> None:
    """Ask for a long stream and reset the connection: while asking, right after, or later."""
    body = {"model": "fake_llm", "prompt": rng.choices(range(3, 61), k=rng.randrange(1, 40)), "stream": True}
    asked = json.dumps({**body, "max_tokens": 200, "ignore_eos": True}).encode()
    request = send(asked, path=b"/v1/completions")
    with socket.create_connection((server.host, server.port), timeout=20) as connection:
        point = rng.random()
        connection.sendall(request[: rng.randrange(len(request))] if point < 0.2 else request)
        if point > 0.4:
            assert connection.recv(65536)
            time.sleep(rng.random() * 0.03)
        reset(connection)


def left(server: Live, engine: Engine) -> dict[str, float]:
    """Return the counts of all resources that a stream takes."""
    gc.collect()
    with socket.create_connection((server.host, server.port), timeout=20) as connection:
        connection.sendall(get(b"/metrics"))
        text = read(connection, bytearray()).body.decode()
    time.sleep(0.02)  # the server ends this request and closes its socket after the answer
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[:1] != "#")
    generator, engine_client = (
        server.service.generators["fake_llm"],
        server.service.generators["fake_llm"].engine_client,
    )
    kinds = [type(thing) for thing in gc.get_objects()]
    return {
        "pages": engine.block_manager.num_used,
        "sequences": len(engine.scheduler.running) + len(engine.scheduler.waiting),
        "requests of the engine thread": engine_client.running,
        "streams": len(generator.streams) + kinds.count(TokenStream),
        "waiting": generator.waiting + generator.admission.queue.tokens,
        "active": server.service.active,
        "body bytes": float(samples["infer_body_bytes"]),
        "tasks": float(samples["infer_event_loop_tasks"]),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


def settle(
    look: Callable[[], dict[str, float]], wanted: dict[str, float] | None = None, leak: str = ""
) -> dict[str, float]:
    """Wait until the counts are `wanted` or nothing runs, a minute at most, and return them.

    What is known to `leak` is not waited for.
    """
    until = time.monotonic() + 60
    while time.monotonic() < until:
        found = look()
        if found == wanted or (wanted is None and not any(found[name] for name in EMPTY if name != leak)):
            return found
        time.sleep(0.05)
    return look()


def growth(
    served: tuple[Live, Engine], streams: int = STREAMS, leak: str = ""
) -> dict[str, tuple[float, float]]:
    """Return the resources that did not return to their earlier count or are not empty."""
    rng = random.Random(5)
    for _ in range(WARM):
        hang_up(served[0], rng)
    before = settle(lambda: left(*served), leak=leak)
    for _ in range(streams):
        hang_up(served[0], rng)
    after = settle(lambda: left(*served), None if leak else before, leak)
    return {
        name: (value, after[name])
        for name, value in before.items()
        if after[name] != value or (name in EMPTY and value)
    }


def test_streams_closed_at_random_points_leak_nothing(served: tuple[Live, Engine]) -> None:
    assert growth(served) == {}
    cancelled = served[1].stats().cancelled
    assert cancelled > STREAMS / 4
    served[1].check_integrity()


def test_request_objects_are_freed_without_garbage_collection(served: tuple[Live, Engine]) -> None:
    """Skip the beat that comes late on purpose; shared memory would wait for it too."""
    rng = random.Random(3)

    def there(kind: type) -> int:
        return sum(issubclass(type(thing), kind) for thing in gc.get_objects())

    def left_over() -> dict[str, int]:
        """Return the counts above what is allowed: the batch that the executor had last may stay."""
        allowed = {HttpProtocol: 0, TokenStream: 0, PendingResult: 1, QueueItem: 1, InferResult: 1}
        counts = {kind: there(kind) for kind in allowed}
        return {kind.__name__: count for kind, count in counts.items() if count > allowed[kind]}

    with live(double()) as tensors:
        gc.collect()
        gc.disable()
        try:
            for number in range(30):
                hang_up(served[0], rng)
                with socket.create_connection((tensors.host, tensors.port), timeout=20) as connection:
                    connection.sendall(send(BODY, *([b"Connection: close"] * (number % 2))))
                    assert read(connection, bytearray()).status == 200
            until = time.monotonic() + 10
            while left_over() and time.monotonic() < until:
                time.sleep(0.05)
            assert not left_over()
        finally:
            gc.enable()


def test_leaked_pages_are_detected(served: tuple[Live, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    release, calls = BlockManager.release, itertools.count()

    def forgets(block_manager: BlockManager, page: int) -> None:
        if next(calls) % 100:
            release(block_manager, page)

    monkeypatch.setattr(BlockManager, "release", forgets)
    assert "pages" in growth(served, 30, "pages")


def test_leaked_streams_are_detected(served: tuple[Live, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    close = TokenStream.close

    def keeps(stream: TokenStream) -> None:
        kept.append(stream)
        close(stream)

    monkeypatch.setattr(TokenStream, "close", keeps)
    assert "streams" in growth(served, 10, "streams")
