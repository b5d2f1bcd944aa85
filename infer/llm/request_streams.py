"""Requests submitted to an engine thread and their outputs, whole or streamed, for threads and for asyncio."""

from __future__ import annotations

import asyncio
import itertools
import queue
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Self

from ..errors import OverloadedError
from .completion import Completion, CompletionChunk, OutputCollector, chunk_of
from .engine.engine_thread import EngineThread
from .engine.requests import Deliver, Output, Request

TimedOutputs = tuple[float, list[Output]]  # when it came, by `time.perf_counter`
_NUMBERS = itertools.count()


def new_id() -> str:
    """Return a request id that is unique within this process."""
    return f"local-{next(_NUMBERS)}"


class RequestBatch:
    """Requests of one call; those beyond the engine's queue limits wait here."""

    def __init__(self, engine_client: EngineThread, requests: Sequence[Request]) -> None:
        self.engine_client, self.requests = engine_client, requests
        self.began = time.perf_counter()
        self.results = {
            r.id: OutputCollector(
                len(r.prompt), r.sampling.n, self.began, logprobs=r.sampling.logprobs is not None
            )
            for r in requests
        }
        self._left, self._running = deque(requests), set[str]()

    @property
    def done(self) -> bool:
        return not self._left and not self._running

    def submit(self, deliver: Deliver) -> None:
        """Submit as many requests as the engine takes; `OverloadedError` only when none of its own is running."""
        while self._left:
            try:
                self.engine_client.submit(self._left[0], deliver)
            except OverloadedError:
                if not self._running:
                    raise
                return
            self._running.add(self._left.popleft().id)

    def add_outputs(self, delivery: TimedOutputs) -> None:
        when, outputs = delivery
        for output in outputs:
            self.results[output.id].add(output, when)
            if self.results[output.id].done:
                self._running.discard(output.id)

    def cancel(self) -> None:
        for id in self._running:
            self.engine_client.cancel(id)

    def completions(self) -> list[list[Completion]]:
        return [self.results[request.id].completions for request in self.requests]


def complete(engine_client: EngineThread, requests: Sequence[Request]) -> list[list[Completion]]:
    """Run requests together and return the `n` completions of each, in order; raises the error of a failed one."""
    deliveries: queue.SimpleQueue[TimedOutputs] = queue.SimpleQueue()
    batch = RequestBatch(engine_client, requests)

    def deliver(outputs: list[Output]) -> None:
        deliveries.put((time.perf_counter(), outputs))

    try:
        batch.submit(deliver)
        while not batch.done:
            batch.add_outputs(deliveries.get())
            batch.submit(deliver)
    finally:
        batch.cancel()
    return batch.completions()


async def acomplete(engine_client: EngineThread, requests: Sequence[Request]) -> list[list[Completion]]:
    """Run requests as `complete` does, without blocking the event loop; cancelling the task cancels them."""
    deliveries: asyncio.Queue[TimedOutputs] = asyncio.Queue()
    deliver, batch = _deliver_to_loop(deliveries), RequestBatch(engine_client, requests)
    try:
        batch.submit(deliver)
        while not batch.done:
            batch.add_outputs(await deliveries.get())
            batch.submit(deliver)
    finally:
        batch.cancel()
    return batch.completions()


def _deliver_to_loop(deliveries: asyncio.Queue[Any]) -> Deliver:
    """Return a `deliver` that puts outputs into a queue of the running event loop; a closed loop gets none."""
    event_loop = asyncio.get_running_loop()

    def deliver(outputs: list[Output]) -> None:
        if not event_loop.is_closed():
            event_loop.call_soon_threadsafe(deliveries.put_nowait, (time.perf_counter(), outputs))

    return deliver


class _RequestHandle:
    """One running request. `completions` grow as it is read; garbage collection cancels what is not finished."""

    def __init__(self, engine_client: EngineThread, request: Request, deliver: Deliver) -> None:
        """Submit the request; `deliver` must not refer to this object, or it would never be collected."""
        self.engine_client, self.request = engine_client, request
        self._batch = RequestBatch(engine_client, [request])
        self._ready: deque[CompletionChunk] = deque()
        self._batch.submit(deliver)

    @property
    def completions(self) -> list[Completion]:
        return self._batch.results[self.request.id].completions

    @property
    def completion(self) -> Completion:
        return self.completions[0]

    def _on_outputs(self, delivery: TimedOutputs) -> None:
        self._batch.add_outputs(delivery)
        self._ready += [chunk_of(o) for o in delivery[1] if o.text or o.token_ids or o.finish]

    def _cancel(self) -> None:
        self._batch.cancel()

    def __del__(self) -> None:
        if hasattr(self, "_batch"):  # it was begun
            self._batch.cancel()


class CompletionStream(_RequestHandle, Iterator[CompletionChunk]):
    """Chunks as the engine makes them; a context manager, or `close()` it."""

    def __init__(self, engine_client: EngineThread, request: Request) -> None:
        deliveries: queue.SimpleQueue[TimedOutputs | None] = queue.SimpleQueue()
        self._deliveries = deliveries
        super().__init__(
            engine_client, request, lambda outputs: deliveries.put((time.perf_counter(), outputs))
        )

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
        self._cancel()
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
        super().__init__(engine_client, request, _deliver_to_loop(deliveries))

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
        self._cancel()
        self._deliveries.put_nowait(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()
