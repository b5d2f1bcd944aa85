"""Outputs of one HTTP request, buffered between the engine's fan-out and the response writer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ...errors import DeadlineError, InferError, NotReadyError
from ...llm.completion import error_of
from ...llm.engine.requests import Output, Request
from ..observability.llm_metrics import LLMMetrics
from ..served_model import EngineClient
from ..workers.crash_retry import FailedOutput, RestartedOutput


class StreamOwner(Protocol):
    """Interface of the `LLMEngine` that a stream reports to."""

    metrics: LLMMetrics
    engine_client: EngineClient

    @property
    def clock(self) -> Callable[[], float]: ...

    def on_first_token(self, request_id: str, when: float | None, began: float = 0.0) -> None: ...

    def release(self, request_id: str, *, running: bool) -> None: ...


class TokenStream:
    """Outputs of all prompts of one HTTP request.

    `next_outputs` returns those of one or more steps and raises, once everything before is read, the error
    that ended the stream: `DeadlineError` after `timeout` seconds, or what `fail` was given. Always call
    `close`; it cancels what still runs.
    """

    def __init__(
        self, owner: StreamOwner, requests: Sequence[Request], *, timeout: float, stepwise: bool
    ) -> None:
        self._owner, self._stepwise = owner, stepwise
        self.began = owner.clock()
        self.requests = {request.id: request for request in requests}
        self.offset: dict[str, int] = {}  # of a request's first completion among all
        self.choices = 0
        for request in requests:
            self.offset[request.id] = self.choices
            self.choices += request.sampling.n
        self._unfinished = {request.id: request.sampling.n for request in requests}
        self._waiting = set(self.requests)
        self._last = [0.0] * self.choices  # when a completion had its latest token
        self._first = self._queued = 0.0  # when the first of them began, and how long no step had read of it
        self._made = 0
        self._ready: list[Output] = []
        self._error: InferError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._alarm = asyncio.get_running_loop().call_later(timeout, self._expire)

    @property
    def done(self) -> bool:
        return not self._unfinished

    @property
    def exhausted(self) -> bool:
        """True when all completions ended and every output was read."""
        return self.done and not self._ready

    @property
    def started(self) -> bool:
        """True when any of its prompts has its first token."""
        return len(self._waiting) < len(self.requests)

    def on_output(self, output: Output, when: float) -> None:
        """Store one output of one completion and update the metrics."""
        owner, key = self._owner, output.id
        if isinstance(output, FailedOutput):
            self.fail(output.error)
            return
        if isinstance(output, RestartedOutput):
            self._restart(key)
            return
        if output.finish in ("error", "cancelled"):
            stopping = output.finish == "cancelled"
            self.fail(NotReadyError("the server is stopping") if stopping else error_of(output))
            return
        if key in self._waiting:
            self._waiting.remove(key)
            owner.on_first_token(key, when, self.began)
            owner.metrics.first_token(when - self.began, output.queued_seconds)
            if not self._first:
                self._first, self._queued = when, output.queued_seconds
        choice = self.offset[key] + output.index
        if count := len(output.token_ids):
            last, self._last[choice] = self._last[choice], when
            owner.metrics.tokens(count, when - last if last else None)
            self._made += count
        self._ready.append(output)
        if output.finish is not None:
            owner.metrics.finished(output.finish, when - self._first)
            self._unfinished[key] -= 1
            if not self._unfinished[key]:
                del self._unfinished[key]
                owner.release(key, running=False)
                if self.done:
                    self._alarm.cancel()
        if self._stepwise or self.done:
            self._wake()

    def timings(self) -> dict[str, Any]:
        """Return token counts and milliseconds for logs and traces, also of a stream cut short."""
        prompt = sum(len(request.prompt) for request in self.requests.values())
        found: dict[str, Any] = {"prompt_tokens": prompt, "tokens": self._made}
        if (pid := self._owner.engine_client.pid) is not None:
            found["worker"] = pid
        if self._first:
            found["queue_ms"] = round(1000 * self._queued, 3)
            found["first_token_ms"] = round(1000 * (self._first - self.began), 3)
            found["stream_ms"] = round(1000 * (max(self._last) - self._first), 3)
        return found

    def _restart(self, key: str) -> None:
        """Drop the unread outputs of a request that starts again after its worker died."""
        if key in self._unfinished:
            first, count = self.offset[key], self.requests[key].sampling.n
            self._ready = [output for output in self._ready if output.id != key]
            self._unfinished[key] = count
            self._last[first : first + count] = [0.0] * count

    async def next_outputs(self, patience: float | None = None) -> list[Output]:
        """Return the outputs since the last call, or all of them unless `stepwise`.

        Returns an empty list when everything was read, or after `patience` seconds.
        """
        if not (self._ready and self._stepwise) and not self.done and self._error is None:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(patience, self._wake) if patience else None
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        ready, self._ready = self._ready, []
        if not ready and self._error is not None:
            raise self._error
        return ready

    async def read_all(self) -> list[Output]:
        """Return all outputs once the stream is complete."""
        outputs: list[Output] = []
        while got := await self.next_outputs():
            outputs += got
        return outputs

    def fail(self, error: InferError) -> None:
        """End the stream with `error`; cancel what still runs."""
        if self._error is None and not self.done:
            self._error = error
            self._release()
            self._wake()

    def close(self) -> None:
        """Release the stream: its reader is gone."""
        if not self.done and self._error is None:
            self._owner.metrics.cancelled("running" if self.started else "queued")
            self._release()
            self._error = InferError("the stream is closed")

    def _expire(self) -> None:
        self._owner.metrics.deadline_exceeded.inc()
        where = "while it ran" if self.started else "in the queue"
        self.fail(DeadlineError(f"the time of the request ran out {where}"))

    def _release(self) -> None:
        self._alarm.cancel()
        for key in self._unfinished:
            self._owner.release(key, running=True)
        for key in self._waiting:
            self._owner.on_first_token(key, None)
        self._waiting.clear()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
