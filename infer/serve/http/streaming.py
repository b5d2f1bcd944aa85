"""Streamed response bodies, and detection of clients that disconnect or stop reading."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

from .body import ClientGoneError
from .routing import Response

T = TypeVar("T")
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
READ_SECONDS = 30.0  # without progress of a write, after which the client counts as gone


async def cancel_on_disconnect(work: Awaitable[T], receive: Receive, delay: float) -> T:
    """Await `work`; cancel it with `ClientGoneError` when the client disconnects, checked from `delay` seconds on."""
    loop, current, gone = asyncio.get_running_loop(), asyncio.current_task(), False
    watcher: asyncio.Task[None] | None = None

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        if current is not None:
            current.cancel()

    def begin() -> None:
        nonlocal watcher
        watcher = loop.create_task(watch())

    timer = loop.call_later(delay, begin)
    try:
        return await work
    except asyncio.CancelledError:
        if gone:
            raise ClientGoneError from None
        raise
    finally:
        timer.cancel()
        if watcher is not None:
            watcher.cancel()


async def send_stream(
    response: Response, headers: list[tuple[bytes, bytes]], receive: Receive, send: Send
) -> None:
    """Send each part of the stream as one write. Raises `ClientGoneError` if the client leaves or stops reading."""
    stream = response.stream
    if stream is None:
        return

    reader = _WriteTimeout()

    async def pump() -> None:
        async for part in stream:
            reader.since = reader.time()
            await send({"type": "http.response.body", "body": part, "more_body": True})
            reader.since = None

    try:
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        await cancel_on_disconnect(pump(), receive, 0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
    except asyncio.CancelledError:
        if reader.gone:
            raise ClientGoneError from None
        raise
    finally:
        reader.timer.cancel()
        stream.close()


class _WriteTimeout:
    """Cancels the task that made it when one write takes too long. `since`: start of the current write, or None.

    One periodic timer: a timer per write would cost as much as the write.
    """

    def __init__(self) -> None:
        self.loop, self.task = asyncio.get_running_loop(), asyncio.current_task()
        self.time, self.gone = self.loop.time, False
        self.since: float | None = None
        self.timer = self.loop.call_later(READ_SECONDS / 4, self._look)

    def _look(self) -> None:
        if self.since is not None and self.time() - self.since > READ_SECONDS and self.task is not None:
            self.gone = True
            self.task.cancel()
        else:
            self.timer = self.loop.call_later(READ_SECONDS / 4, self._look)
