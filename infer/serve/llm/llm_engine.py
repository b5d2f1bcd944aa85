"""A served language model: its driver's thread makes tokens, the event loop hands each request its own."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...errors import InferError, NotReadyError, OverloadedError
from ...llm.engine.requests import Output, Request
from ..batching.latency_model import ThroughputModel, WaitErrorModel
from ..fork_server.client import forks_of
from ..limits import ServeLimits
from ..observability.llm_metrics import GenerationMetrics
from ..workers.remote_engine import RemoteDriver
from ..workers.supervisor import ended
from ..workers.warmup import warm
from .grammar_trials import trials_of
from .prompt_queue import Line, Waiter
from .token_stream import Stream
from .tokenizer_pool import texts_of

log = logging.getLogger("infer.serve")
LOOK_SECONDS = 0.25
AGING = 30.0  # seconds: `EngineLimits.aging`, whose import would bring torch


class Generator:
    """`open` submits the prompts of one HTTP request; all but `_deliver` is called on the event loop's thread.

    `language` is the artifact's text side and engine (`infer.llm.llm`): `text` turns text to token ids
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
        self.adapters: tuple[str, ...] = tuple(getattr(language, "adapter_names", ()))
        files = sorted(getattr(predictor.manifest, "files", {}).items())
        self.fingerprint = f"infer-{hashlib.sha256(repr(files).encode()).hexdigest()[:12]}"
        self.forks = forks_of(language, predictor.name)
        self.trials, self.texts = trials_of(self.forks), texts_of(language, self.forks)
        self.unproven: str | None = "tokenizer and chat template are being tried"
        self.draining = False
        self.line = Line()  # submitted, without a first token
        self.foretold = WaitErrorModel()
        self.rate = ThroughputModel()  # of prompt tokens until their first token, whatever holds them up
        self._last_start = -math.inf
        self._seed(getattr(predictor, "speeds", ()))
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
        self.proof = home.create_task(self._prove())
        self._look()

    def warmup(self) -> None:
        """Few tokens, so that the first request pays for nothing. To be called before `start`."""
        if not isinstance(self.driver, RemoteDriver):
            self._seed(warm(self.driver, self.context))

    def _seed(self, measured: Iterable[tuple[float, float]]) -> None:
        for tokens, seconds in measured:
            self.rate.observe(tokens, seconds)

    def open(self, requests: Sequence[Request], *, timeout: float, stepwise: bool) -> Stream:
        """Submit them; raises `InputError`, or `OverloadedError` with the seconds after which to try again.

        `stepwise`: wake the reader at each step of the engine, not only at the end.
        """
        tokens = sum(len(request.prompt) for request in requests)
        tenant, priority = requests[0].tenant, requests[0].priority
        self.check_admission(
            timeout=timeout, priority=priority, requests=len(requests), tokens=tokens, tenant=tenant
        )
        stream = Stream(self, requests, timeout=timeout, stepwise=stepwise)
        for request in requests:
            size = len(request.prompt)
            told = self.start_seconds(priority, size, tenant)
            self.line.enter(request.id, Waiter(tenant, self.clock() + AGING * priority, size, told))
        try:
            for request in requests:
                if isinstance(self.driver, RemoteDriver):
                    self.driver.submit(request, self._deliver_to, replay=not stepwise)
                else:
                    self.driver.submit(request, self._deliver_to)
                self._streams[request.id] = stream
        except InferError as error:
            stream.fail(error)
            self.metrics.rejected("overloaded" if isinstance(error, OverloadedError) else error.code)
            raise
        self.metrics.prompt_tokens.inc(tokens)
        return stream

    def check_admission(
        self, *, timeout: float, priority: int = 0, requests: int = 1, tokens: int = 1, tenant: str = ""
    ) -> None:
        """Raises `OverloadedError` or `NotReadyError` where these would be refused now; by default the smallest, so
        that nobody tokenizes a larger one for nothing."""
        limits = self.limits
        if self.draining:
            raise NotReadyError("the server is stopping")
        wait, allowed = self.start_seconds(priority, tenant=tenant), min(timeout, limits.max_start_seconds)
        cautious = wait + self.foretold.caution(wait)
        if self.line.is_full(tenant, requests, tokens, limits):
            full = "the queue is full"
        elif cautious > allowed:
            full = f"a first token would take {wait:.2f} to {cautious:.2f} s, {allowed:.2f} is allowed"
        else:
            return
        self.metrics.rejected("overloaded")
        raise OverloadedError(full, retry_after=wait)

    def start_seconds(self, priority: int = 0, tokens: int = 0, tenant: str = "") -> float:
        """Until a prompt of this priority that comes now would begin, or have its first token after `tokens` of its
        own: the tokens before that, over the rate measured."""
        ahead = self.line.ahead(tenant, self.clock() + AGING * priority, tokens)
        return self.rate.seconds(ahead + tokens)

    @property
    def failure(self) -> BaseException | None:
        return self.driver.failure

    @property
    def healthy(self) -> bool:
        """The driver lives, and its current step is not stuck."""
        stuck = bool(self._streams) and self.clock() - self.driver.beat > self.limits.wedged_seconds
        return self.failure is None and not stuck

    @property
    def ready(self) -> bool:
        """A request would be run now."""
        return self.unproven is None and self.healthy and getattr(self.driver, "ready", True)

    @property
    def idle(self) -> bool:
        return not self._streams

    @property
    def waiting_requests(self) -> int:
        return self.line.requests

    @property
    def waiting_tokens(self) -> int:
        return self.line.tokens

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
        for part in (self.trials, self.texts, self.forks):
            if part is not None:
                part.close()

    async def _prove(self) -> None:
        try:
            await self.texts.prove(chat=self.template is not None)
            self.unproven = None
        except InferError as error:
            self.unproven = str(error)
            log.error("%s is not ready: %s", self.predictor.name, error)

    def _look(self) -> None:
        """Now and then: fail all streams when the driver died, for a dead driver delivers nothing."""
        if self.failure is not None:
            log.critical("the engine of %s died", self.predictor.name, exc_info=self.failure)
            self.stop(ended(self.failure))
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

    def started(self, request_id: str, when: float | None, began: float = 0.0) -> None:
        """A waiting request, there since `began`, got its first token or, `when` None, was taken back."""
        _, _, tokens, told = self.line.leave(request_id)
        if when is not None:
            self.foretold.observe(told, when - began)
            self.rate.observe(tokens, max(when - max(self._last_start, began), 0.0))
            self._last_start = when

    def forget(self, request_id: str, *, running: bool) -> None:
        """The stream wants no more of this request."""
        if self._streams.pop(request_id, None) is not None and running:
            self.driver.cancel(request_id)
