"""Clients that go on asking until they are refused, and one that hangs up while it waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx

from infer.serve.server import LINGER
from tests.support.fake_predictors import Live
from tests.support.raw_http import GOOD, connect, read

GONE = "gone"  # the server answered nobody any more


def until_refused(
    url: str, path: str, body: Any, *, clients: int, stop: Callable[[], None]
) -> list[int | str]:
    """Return the outcome of each request; `stop` is called once every client had a response.

    A client ends at its first answer that is not 200, as a balancer would, or at an error, which is an outcome by its
    text. Only from `LINGER` seconds after the stop on may a connection be refused: till then 503 is promised.
    """
    outcomes: list[int | str] = []
    stopped: list[float] = []

    def gone(error: httpx.HTTPError) -> bool:
        late = bool(stopped) and time.monotonic() - stopped[0] >= LINGER
        return late and isinstance(error, httpx.ConnectError | httpx.ReadError)

    async def client(answered: asyncio.Event) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            while True:
                try:
                    answer = await http.post(path, json=body)
                except httpx.HTTPError as error:
                    outcomes.append(GONE if gone(error) else repr(error))
                    return
                finally:
                    answered.set()
                outcomes.append(answer.status_code)
                if answer.status_code != 200:
                    return

    async def load() -> None:
        events = [asyncio.Event() for _ in range(clients)]
        tasks = [asyncio.create_task(client(event)) for event in events]
        await asyncio.gather(*(event.wait() for event in events))
        stopped.append(time.monotonic())
        stop()
        await asyncio.wait_for(asyncio.gather(*tasks), 60)

    asyncio.run(load())
    return outcomes


def hang_up_behind_another(server: Live) -> None:
    """Of two requests to a model that runs one at a time the second hangs up: it leaves the queue at once."""
    engine = server.service.engines["double"]
    with connect(server) as first, connect(server) as second:
        first.sendall(GOOD)
        time.sleep(0.05)
        second.sendall(GOOD)
        time.sleep(0.05)
        assert engine.queue.requests == 1
        second.close()
        deadline = time.monotonic() + 0.2
        while engine.queue.requests and time.monotonic() < deadline:
            time.sleep(0.005)
        assert engine.queue.requests == 0
        assert read(first, bytearray()).status == 200
