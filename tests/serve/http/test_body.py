"""Streamed bodies: a disconnect ends them, and the source is closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from infer.serve.http import body
from infer.serve.http.body import ClientGoneError
from infer.serve.http.routing import Response


class Endless:
    """Pieces for ever, or `count` of them."""

    def __init__(self, count: int | None = None) -> None:
        self.count, self.closed, self.given = count, False, 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self.count is None or self.given < self.count:
            await asyncio.sleep(0)
            self.given += 1
            yield b"piece"

    def close(self) -> None:
        self.closed = True


async def never() -> Any:
    await asyncio.Event().wait()


def test_parts_are_sent_one_by_one_and_the_source_is_closed() -> None:
    stream, sent = Endless(3), list[Any]()

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(body.send_stream(Response(stream=stream), [], never, send))
    assert [message["type"] for message in sent] == ["http.response.start"] + ["http.response.body"] * 4
    assert [message.get("more_body") for message in sent[1:]] == [True, True, True, False]
    assert stream.closed


def test_a_disconnect_ends_the_stream_at_once() -> None:
    stream, left = Endless(), asyncio.Event()

    async def receive() -> Any:
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if stream.given == 2:
            left.set()

    with pytest.raises(ClientGoneError):
        asyncio.run(body.send_stream(Response(stream=stream), [], receive, send))
    assert stream.given < 10
    assert stream.closed


def test_source_errors_and_cancellation_are_not_disconnects() -> None:
    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(body.send_stream(Response(stream=Endless()), [], never, send))

    async def cancelled() -> None:
        async def quiet(message: Any) -> None: ...

        task = asyncio.create_task(body.send_stream(Response(stream=Endless()), [], never, quiet))
        await asyncio.sleep(0.01)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
