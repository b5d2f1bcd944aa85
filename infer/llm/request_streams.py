"""Requests submitted to an engine thread and their outputs, whole or streamed, for threads and for asyncio."""

from __future__ import annotations

import asyncio
import itertools
import queue
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import Any, Self

from ..errors import OverloadedError
from .completion import Completion, CompletionChunk, OutputCollector, chunk_of
from .engine.engine_thread import EngineThread
from .engine.requests import Output, Request

# Outputs of one request, and when they came by `time.perf_counter`.
TimedOutputs = tuple[OutputCollector, list[Output], float]
Put = Callable[[TimedOutputs], object]
_NUMBERS = itertools.count()


def new_id() -> str:
    """Return a request id that is unique within this process."""
    return f"local-{next(_NUMBERS)}"


class RequestBatch:
    """Requests of one call; those beyond the engine's queue limits wait here. `put` gets outputs on its thread."""

    def __init__(self, engine_client: EngineThread, requests: Sequence[Request], put: Put) -> None:
        self.engine_client, self._put = engine_client, put
        began = time.perf_counter()
        self.results = [OutputCollector(request, began) for request in requests]
        self._left, self._running = deque(self.results), set[OutputCollector]()

    @property
    def done(self) -> bool:
        return not self._left and not self._running

    def submit(self) -> None:
        """Submit as many requests as the engine takes; `OverloadedError` only when none of its own is running."""
        while self._left:
            collector = self._left[0]
            try:
                self.engine_client.submit(collector.request, partial(_deliver, self._put, collector))
            except OverloadedError:
                if not self._running:
                    raise
                return
            self._running.add(self._left.popleft())

    def add_outputs(self, timed: TimedOutputs) -> None:
        collector, outputs, when = timed
        for output in outputs:
            collector.add(output, when)
        if collector.done:
            self._running.discard(collector)

    def cancel(self) -> None:
        for collector in self._running:
            self.engine_client.cancel(collector.request.id)

    def completions(self) -> list[list[Completion]]:
        return [collector.completions for collector in self.results]


def _deliver(put: Put, collector: OutputCollector, outputs: list[Output]) -> None:
    put((collector, outputs, time.perf_counter()))


def complete(engine_client: EngineThread, requests: Sequence[Request]) -> list[list[Completion]]:
    """Run requests together and return the `n` completions of each, in order; raises the error of a failed one."""
    deliveries: queue.SimpleQueue[TimedOutputs] = queue.SimpleQueue()
    batch = RequestBatch(engine_client, requests, deliveries.put)
    try:
        batch.submit()
        while not batch.done:
            batch.add_outputs(deliveries.get())
            batch.submit()
    finally:
        batch.cancel()
    return batch.completions()


async def acomplete(engine_client: EngineThread, requests: Sequence[Request]) -> list[list[Completion]]:
    """Run requests as `complete` does, without blocking the event loop; cancelling the task cancels them."""
    deliveries: asyncio.Queue[TimedOutputs] = asyncio.Queue()
    batch = RequestBatch(engine_client, requests, _put_from_thread(deliveries))
    try:
        batch.submit()
        while not batch.done:
            batch.add_outputs(await deliveries.get())
            batch.submit()
    finally:
        batch.cancel()
    return batch.completions()


def _put_from_thread(deliveries: asyncio.Queue[Any]) -> Put:
    """Return a `put` for other threads into a queue of the running event loop; a closed loop gets nothing."""
    event_loop = asyncio.get_running_loop()

    def put(timed: TimedOutputs) -> None:
        if not event_loop.is_closed():
            event_loop.call_soon_threadsafe(deliveries.put_nowait, timed)

    return put


class _RequestHandle:
    """One running request. `completions` grow as it is read; garbage collection cancels what is not finished."""

    def __init__(self, engine_client: EngineThread, request: Request, put: Put) -> None:
        """Submit the request; `put` must not refer to this object, or it would never be collected."""
        self.engine_client, self.request = engine_client, request
        self._batch = RequestBatch(engine_client, [request], put)
        self._ready: deque[CompletionChunk] = deque()
        self._batch.submit()

    @property
    def completions(self) -> list[Completion]:
        return self._batch.results[0].completions

    @property
    def completion(self) -> Completion:
        return self.completions[0]

    def _on_outputs(self, timed: TimedOutputs) -> None:
        self._batch.add_outputs(timed)
        self._ready += [chunk_of(o) for o in timed[1] if o.text or o.token_ids or o.finish]

    def __del__(self) -> None:
        if hasattr(self, "_batch"):  # it was begun
            self._batch.cancel()


class CompletionStream(_RequestHandle, Iterator[CompletionChunk]):
    """Chunks as the engine makes them; a context manager, or `close()` it."""

    def __init__(self, engine_client: EngineThread, request: Request) -> None:
        deliveries: queue.SimpleQueue[TimedOutputs | None] = queue.SimpleQueue()
        self._deliveries = deliveries
        super().__init__(engine_client, request, deliveries.put)

    def __next__(self) -> CompletionChunk:
        while not self._ready:
            if self._batch.done:
                raise StopIteration
            delivery = self._deliveries.get()
            if delivery is None:
                raise StopIteration
            self._on_outputs(delivery)
        return self._ready.popleft()

    def close(self) -> None:
        self._batch.cancel()
        self._deliveries.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class AsyncCompletionStream(_RequestHandle, AsyncIterator[CompletionChunk]):
    """Chunks for `async for`; an async context manager, or `await aclose()` it."""

    def __init__(self, engine_client: EngineThread, request: Request) -> None:
        deliveries: asyncio.Queue[TimedOutputs | None] = asyncio.Queue()
        self._deliveries = deliveries
        super().__init__(engine_client, request, _put_from_thread(deliveries))

    async def __anext__(self) -> CompletionChunk:
        while not self._ready:
            if self._batch.done:
                raise StopAsyncIteration
            delivery = await self._deliveries.get()
            if delivery is None:
                raise StopAsyncIteration
            self._on_outputs(delivery)
        return self._ready.popleft()

    async def aclose(self) -> None:
        self._batch.cancel()
        self._deliveries.put_nowait(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()
