"""Streams of one language model: the outputs of a request, on their way from the engine to the response writer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msgspec import structs

from ...errors import DeadlineError, InferError, NotReadyError
from ...llm.completion import error_of
from ...llm.engine.requests import Output, Request
from ..observability.llm_metrics import LLMMetrics
from ..served_model import EngineClient
from ..workers.crash_retry import FailedOutput, RestartedOutput
from .prompt_queue import PromptAdmission, QueuedPrompt


class ServedPrompt:
    """One prompt of a stream. `first`: number of its first completion among all of the stream.

    `queued`: its place in the queue, until its first token; `submitted`: the engine has it or had it.
    """

    __slots__ = ("cached_tokens", "first", "queued", "request", "submitted", "unfinished")

    def __init__(self, request: Request, first: int, queued: QueuedPrompt) -> None:
        self.request, self.first = request, first
        self.queued: QueuedPrompt | None = queued
        self.unfinished, self.submitted, self.cached_tokens = request.sampling.n, False, 0


class OpenStreams:
    """Streams of one engine that are not closed, and what they share.

    Outputs come on the engine's thread, with the prompt that they belong to: none is looked up by its id.
    """

    def __init__(
        self,
        engine_client: EngineClient,
        admission: PromptAdmission,
        metrics: LLMMetrics,
        clock: Callable[[], float],
    ) -> None:
        self.engine_client, self.admission = engine_client, admission
        self.metrics, self.clock = metrics, clock
        self.loop: asyncio.AbstractEventLoop | None = None
        self.all: set[TokenStream] = set()
        self._arrived: deque[tuple[TokenStream, ServedPrompt, list[Output], float]] = deque()
        self._awake = False  # the event loop is about to read what arrived

    def __len__(self) -> int:
        """Count the prompts that run or wait."""
        return sum([stream.unfinished for stream in self.all])

    def open(self, requests: Sequence[Request], *, timeout: float, stepwise: bool) -> TokenStream:
        """Submit the prompts of one HTTP request; raises the error of one that the engine refuses."""
        stream = TokenStream(self, requests, timeout=timeout, stepwise=stepwise)
        self.all.add(stream)
        try:
            for prompt in stream.prompts:
                deliver = partial(self._deliver, stream, prompt)
                self.engine_client.submit(prompt.request, deliver, replay=not stepwise)
                prompt.submitted = True
        except InferError as error:
            stream.fail(error)
            raise
        return stream

    def fail(self, error: InferError) -> None:
        """End all streams with an error."""
        for stream in list(self.all):
            stream.fail(error)

    def _deliver(self, stream: TokenStream, prompt: ServedPrompt, outputs: list[Output]) -> None:
        """Pass outputs of one step to the event loop, with one wake-up for all; called on the engine's thread."""
        loop = self.loop
        if loop is None or loop.is_closed():
            return
        self._arrived.append((stream, prompt, outputs, self.clock()))
        if not self._awake:
            self._awake = True
            loop.call_soon_threadsafe(self._fan_out)

    def _fan_out(self) -> None:
        self._awake = False  # before reading: what comes from now on wakes the loop again
        while self._arrived:
            stream, prompt, outputs, when = self._arrived.popleft()
            for output in outputs:
                stream.on_output(prompt, output, when)


class TokenStream:
    """Outputs of all prompts of one HTTP request; `index` of an output counts the completions of all of them.

    `next_outputs` returns those of one or more steps and raises, once everything before is read, the error
    that ended the stream: `DeadlineError` after `timeout` seconds, or what `fail` was given. Always call
    `close`; it cancels what still runs.
    """

    def __init__(
        self, owner: OpenStreams, requests: Sequence[Request], *, timeout: float, stepwise: bool
    ) -> None:
        self._owner, self._stepwise = owner, stepwise
        self.began = owner.clock()
        self.prompts: list[ServedPrompt] = []
        self.choices: list[ServedPrompt] = []  # the prompt of each completion
        for request in requests:
            queued = owner.admission.add(request.tenant, request.priority, len(request.prompt))
            self.prompts.append(ServedPrompt(request, len(self.choices), queued))
            self.choices += [self.prompts[-1]] * request.sampling.n
        self.unfinished = len(self.prompts)
        self._last = [0.0] * len(self.choices)  # when a completion had its latest token
        self._first: float | None = None  # when the first of them began
        self._queued = 0.0  # how long no step had read of that one
        self._made = 0
        self._ready: list[Output] = []
        self._error: InferError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._alarm = asyncio.get_running_loop().call_later(timeout, self._expire)

    @property
    def done(self) -> bool:
        return not self.unfinished

    @property
    def exhausted(self) -> bool:
        """True when all completions ended and every output was read."""
        return self.done and not self._ready

    @property
    def started(self) -> bool:
        """True when any of its prompts has its first token."""
        return self._first is not None

    def on_output(self, prompt: ServedPrompt, output: Output, when: float) -> None:
        """Store one output of one completion and update the metrics; a stream that has ended takes none."""
        metrics = self._owner.metrics
        if self._error is not None or not prompt.unfinished:
            return
        if isinstance(output, FailedOutput):
            self.fail(output.error)
            return
        if isinstance(output, RestartedOutput):
            self._restart(prompt)
            return
        if output.finish in ("error", "cancelled"):
            stopping = output.finish == "cancelled"
            self.fail(NotReadyError("the server is stopping") if stopping else error_of(output))
            return
        if prompt.queued is not None:
            self._owner.admission.remove(prompt.queued, when, self.began)
            prompt.queued = None
            metrics.first_token(when - self.began, output.queued_seconds)
            if self._first is None:
                self._first, self._queued = when, output.queued_seconds
        choice = prompt.first + output.index
        if count := len(output.token_ids):
            last, self._last[choice] = self._last[choice], when
            metrics.tokens(count, when - last if last else None)
            self._made += count
        prompt.cached_tokens = output.cached_tokens or prompt.cached_tokens
        self._ready.append(structs.replace(output, index=choice) if prompt.first else output)
        if output.finish is not None:
            metrics.finished(output.finish, when - (self._first or 0.0))
            prompt.unfinished -= 1
            if not prompt.unfinished:
                self.unfinished -= 1
                if self.done:
                    self._alarm.cancel()
                    self._owner.all.discard(self)
        if self._stepwise or self.done:
            self._wake()

    def timings(self) -> dict[str, Any]:
        """Return token counts and milliseconds for logs and traces, also of a stream cut short."""
        tokens = sum(len(prompt.request.prompt) for prompt in self.prompts)
        found: dict[str, Any] = {"prompt_tokens": tokens, "tokens": self._made}
        if (pid := self._owner.engine_client.pid) is not None:
            found["worker"] = pid
        if self._first is not None:
            found["queue_ms"] = round(1000 * self._queued, 3)
            found["first_token_ms"] = round(1000 * (self._first - self.began), 3)
            found["stream_ms"] = round(1000 * (max(self._last) - self._first), 3)
        return found

    def _restart(self, prompt: ServedPrompt) -> None:
        """Drop the unread outputs of a prompt that starts again after its worker died."""
        count = prompt.request.sampling.n
        self._ready = [output for output in self._ready if self.choices[output.index] is not prompt]
        prompt.unfinished = count
        self._last[prompt.first : prompt.first + count] = [0.0] * count

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
            self._error = InferError("the stream is closed")
            self._release()

    def _expire(self) -> None:
        self._owner.metrics.deadline_exceeded.inc()
        where = "while it ran" if self.started else "in the queue"
        self.fail(DeadlineError(f"the time of the request ran out {where}"))

    def _release(self) -> None:
        self._alarm.cancel()
        self._owner.all.discard(self)
        for prompt in self.prompts:
            if prompt.submitted and prompt.unfinished:
                self._owner.engine_client.cancel(prompt.request.id)
            if prompt.queued is not None:
                self._owner.admission.remove(prompt.queued, None, self.began)
                prompt.queued = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class UsageCounter:
    """Token usage of all prompts and completions of one request."""

    def __init__(self, stream: TokenStream) -> None:
        self._prompts = stream.prompts
        self.prompt_tokens = sum(len(prompt.request.prompt) for prompt in stream.prompts)
        self.completion_tokens = self.reasoning_tokens = 0
        self.reasons = False  # completions may hold thoughts

    def add(self, output: Output, *, reasoning: int = 0) -> None:
        """Count the tokens of an output, `reasoning` of which belong to a thought."""
        self.completion_tokens += len(output.token_ids)
        self.reasoning_tokens += reasoning

    @property
    def cached_tokens(self) -> int:
        return sum([prompt.cached_tokens for prompt in self._prompts])
