"""Requests that reach a live server in one turn of its event loop."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tests.support.fake_predictors import Live
from tests.support.raw_http import BODY, connect, get, read, send

HEAD = b"X-Test: crowd"


@contextmanager
def standing(server: Live, model: str = "double") -> Iterator[None]:
    """Block the event loop, so that all requests sent meanwhile arrive in one iteration."""
    waits, over = threading.Event(), threading.Event()

    def wait() -> None:
        waits.set()
        over.wait(20)

    server.service.engines[model].loop.call_soon_threadsafe(wait)
    assert waits.wait(20)
    try:
        yield
    finally:
        over.set()


def row(*numbers: Any) -> bytes:
    """Build a request whose body is as long as the others'."""
    text = b",".join(str(number).encode() for number in numbers)
    return send(BODY.replace(b"1,2,3,4", text.ljust(20)), HEAD)


def crowd(server: Live, requests: list[bytes]) -> list[Any]:
    """Return the responses to requests of one loop iteration, each from its own client."""
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(server)) for _ in requests]
        for client in clients:
            client.sendall(get())
            read(client, bytearray())
        with standing(server):
            for client, request in zip(clients, requests, strict=True):
                client.sendall(request)
        return [read(client, bytearray()) for client in clients]


def doubled(answer: Any) -> list[float]:
    found: list[float] = json.loads(answer.body)["outputs"][0]["data"]
    return found


def until(true: Any, seconds: float = 40.0) -> None:
    """Wait until it is true; a busy machine may take long."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not become true"
        time.sleep(0.005)
