"""A served language model: its driver's thread makes tokens, the event loop hands each request its own."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import DeadlineError, InferError, NotReadyError, OverloadedError
from ..generate.requests import Output, Request, Sampling
from .generation_metrics import GenerationMetrics
from .limits import ServeLimits

log = logging.getLogger("infer.serve")
LOOK_SECONDS = 0.25
SMOOTHING = 0.2  # of the mean time between two requests that begin


class Generator:
    """`open` submits the prompts of one HTTP request; all but `_deliver` is called on the event loop's thread.

    `language` is the artifact's text side and engine (`infer.generate.language`): `text` turns text to token ids
    and back, `template` renders conversations or is None, `driver` is the thread that runs the engine.
    """

    def __init__(
        self,
        predictor: Any,
        limits: ServeLimits,
        metrics: GenerationMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.predictor, self.limits, self.metrics, self.clock = predictor, limits, metrics, clock
        self.language = language = predictor.language
        self.text, self.template, self.driver = language.text, language.template, language.driver
        self.context: int = language.context
        self.vocab_size: int = language.vocab_size
        files = sorted(getattr(predictor.manifest, "files", {}).items())
        self.fingerprint = f"infer-{hashlib.sha256(repr(files).encode()).hexdigest()[:12]}"
        self.draining = False
        self.waiting_requests = self.waiting_tokens = 0  # submitted, without a first token
        self._between = 0.0  # seconds from one first token to the next while others wait
        self._last_start = 0.0
        self._streams: dict[str, Stream] = {}  # id of the engine's request → whose it is
        self._deliver_to = self._deliver  # one object, so that the driver calls it once per step
        self._home: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Of every answer, for balancers."""
        return [(b"x-infer-queue", b"%d" % self.waiting_requests)]

    def start(self, home: asyncio.AbstractEventLoop) -> None:
        """Outputs go to `home`; call once."""
        self._home = home
        self._look()

    def warmup(self) -> None:
        """Two tokens, so that the first request pays for nothing. To be called before `start`."""
        done = threading.Event()
        request = Request(id="warmup", prompt=[0], sampling=Sampling(max_tokens=2, ignore_eos=True))
        self.driver.submit(request, lambda outputs: done.set() if outputs[-1].finish else None)
        while not done.wait(0.05):
            if self.driver.failure is not None:
                raise InferError("the engine died while it warmed up") from self.driver.failure

    def open(self, requests: Sequence[Request], *, timeout: float, stepwise: bool) -> Stream:
        """Submit them; raises `InputError`, or `OverloadedError` with the seconds after which to try again.

        `stepwise`: wake the reader at each step of the engine, not only at the end.
        """
        tokens = sum(len(request.prompt) for request in requests)
        self._admit(len(requests), tokens, timeout)
        stream = Stream(self, requests, timeout=timeout, stepwise=stepwise)
        self.waiting_requests += len(requests)
        self.waiting_tokens += tokens
        try:
            for request in requests:
                self.driver.submit(request, self._deliver_to)
                self._streams[request.id] = stream
        except InferError as error:
            stream.fail(error)
            self.metrics.rejected("overloaded" if isinstance(error, OverloadedError) else error.code)
            raise
        self.metrics.prompt_tokens.inc(tokens)
        return stream

    def _admit(self, requests: int, tokens: int, timeout: float) -> None:
        limits, wait = self.limits, self._between * self.waiting_requests
        if self.draining:
            raise NotReadyError("the server is stopping")
        if (
            self.waiting_requests + requests > limits.max_queue_requests
            or self.waiting_tokens + tokens > limits.max_queue_tokens
        ):
            full = "the queue is full"
        elif wait > min(timeout, limits.max_start_seconds):
            full = f"a first token would take about {wait:.0f} s"
        else:
            return
        self.metrics.rejected("overloaded")
        raise OverloadedError(full, retry_after=max(wait, 1.0))

    @property
    def failure(self) -> BaseException | None:
        return self.driver.failure

    @property
    def healthy(self) -> bool:
        """The driver lives, and its current step is not stuck."""
        stuck = bool(self._streams) and self.clock() - self.driver.beat > self.limits.wedged_seconds
        return self.failure is None and not stuck

    @property
    def idle(self) -> bool:
        return not self._streams

    @property
    def running(self) -> int:
        """Requests that have their first token and not their last."""
        return len(self._streams) - self.waiting_requests

    @property
    def waiting(self) -> int:
        return self.waiting_requests

    @property
    def beat(self) -> float:
        return self.driver.beat

    def drain(self) -> None:
        """Admit nothing more; what was admitted still runs."""
        self.draining = True

    def stop(self, error: InferError) -> None:
        """Fail every stream; the driver ends when its predictor is closed."""
        self.draining = True
        if self._timer is not None:
            self._timer.cancel()
        for stream in set(self._streams.values()):
            stream.fail(error)

    def _look(self) -> None:
        """Now and then: fail all streams when the driver died, for a dead driver delivers nothing."""
        if self.failure is not None:
            log.critical("the engine of %s died", self.predictor.name, exc_info=self.failure)
            self.stop(InferError("the engine died"))
        elif self._home is not None:
            self._timer = self._home.call_later(LOOK_SECONDS, self._look)

    def _deliver(self, outputs: list[Output]) -> None:
        """On the driver's thread, once per step."""
        home = self._home
        if home is not None and not home.is_closed():
            home.call_soon_threadsafe(self._fan_out, outputs, self.clock())

    def _fan_out(self, outputs: list[Output], when: float) -> None:
        for output in outputs:
            stream = self._streams.get(output.id)
            if stream is not None:
                stream.put(output, when)

    def started(self, tokens: int, when: float | None) -> None:
        """A waiting request of so many tokens got its first one, or, `when` None, was taken back."""
        self.waiting_requests -= 1
        self.waiting_tokens -= tokens
        if when is None:
            return
        if self.waiting_requests and self._last_start:
            self._between += SMOOTHING * (when - self._last_start - self._between)
        self._last_start = when if self.waiting_requests else 0.0

    def forget(self, request_id: str, *, running: bool) -> None:
        """The stream wants no more of this request."""
        if self._streams.pop(request_id, None) is not None and running:
            self.driver.cancel(request_id)


class Stream:
    """What the engine makes for one HTTP request. `async for outputs in stream`: those of one or more steps.

    Raises, once what came before is read, the error that ended it: `DeadlineError` after `timeout` seconds, or
    what `fail` was given. `close` is always to be called; it cancels what still runs.
    """

    def __init__(
        self, owner: Generator, requests: Sequence[Request], *, timeout: float, stepwise: bool
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
        self._ready: list[Output] = []
        self._error: InferError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._alarm = asyncio.get_running_loop().call_later(timeout, self._expire)

    @property
    def done(self) -> bool:
        return not self._unfinished

    @property
    def drained(self) -> bool:
        """Done, and all of it read."""
        return self.done and not self._ready

    @property
    def started(self) -> bool:
        """Any of its prompts has its first token."""
        return len(self._waiting) < len(self.requests)

    def put(self, output: Output, when: float) -> None:
        """One completion of one request went on."""
        owner, key = self._owner, output.id
        if output.finish in ("error", "cancelled"):
            stopping = output.finish == "cancelled"
            reason = "the server is stopping" if stopping else f"the model failed: {output.stopped_by}"
            self.fail(NotReadyError(reason) if stopping else InferError(reason))
            return
        if key in self._waiting:
            self._waiting.remove(key)
            owner.started(len(self.requests[key].prompt), when)
            owner.metrics.first_token.observe(when - self.began)
        choice = self.offset[key] + output.index
        if count := len(output.token_ids):
            last, self._last[choice] = self._last[choice], when
            owner.metrics.tokens(count, when - last if last else None)
        self._ready.append(output)
        if output.finish is not None:
            owner.metrics.finished(output.finish)
            self._unfinished[key] -= 1
            if not self._unfinished[key]:
                del self._unfinished[key]
                owner.forget(key, running=False)
                if self.done:
                    self._alarm.cancel()
        if self._stepwise or self.done:
            self._wake()

    async def take(self, patience: float | None = None) -> list[Output]:
        """What came since the last call; nothing when all is read, or after `patience` seconds."""
        if not self._ready and not self.done and self._error is None:
            home = asyncio.get_running_loop()
            self._waiter = home.create_future()
            timer = home.call_later(patience, self._wake) if patience else None
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

    async def rest(self) -> list[Output]:
        """Everything, once it is complete."""
        outputs: list[Output] = []
        while got := await self.take():
            outputs += got
        return outputs

    def fail(self, error: InferError) -> None:
        """End it with this error; what still runs is cancelled."""
        if self._error is None and not self.done:
            self._error = error
            self._release()
            self._wake()

    def close(self) -> None:
        """Nobody reads any more."""
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
            self._owner.forget(key, running=True)
        for key in self._waiting:
            self._owner.started(len(self.requests[key].prompt), None)
        self._waiting.clear()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
