"""A served language model: its engine's thread makes tokens, the event loop routes them to requests."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Sequence

from ...errors import InferError, NotReadyError, OverloadedError
from ...llm.engine.requests import Output, Request
from ...tasks.media_model import MediaModel
from ..limits import ServeLimits
from ..observability.llm_metrics import LLMMetrics
from ..served_model import ServedLanguageModel, ServedModel
from ..workers.restart_policy import error_for_requests
from ..workers.self_test import warm_up
from .grammar_trials import grammar_trials_of
from .prompt_queue import PromptAdmission
from .token_stream import TokenStream
from .tokenizer_pool import ForkedTokenizer, LocalTokenizer, TokenizerPool, fork_server_of

log = logging.getLogger("infer.serve")
LOOK_SECONDS = 0.25


class LLMEngine:
    """Event-loop front end of one engine; every method but `_deliver` runs on the event loop's thread.

    `language_model` is the artifact's text side and engine (`infer.llm.llm`): `text` turns text to token ids and
    back, `template` renders conversations or is None, `engine_client` is the thread (or worker) that runs the
    engine.
    """

    def __init__(
        self,
        model: ServedModel,
        language_model: ServedLanguageModel,
        limits: ServeLimits,
        metrics: LLMMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model, self.limits, self.metrics, self.clock = model, limits, metrics, clock
        self.info, self.language_model = model.info, language_model
        self.text, self.template, self.engine_client = (
            language_model.text,
            language_model.template,
            language_model.engine_client,
        )
        self.context, self.start_tokens = language_model.context, language_model.start_tokens
        self.vocab_size, self.adapters = language_model.vocab_size, language_model.adapter_names
        self.media = MediaModel(self.info) if "preprocessing" in self.info.meta else None
        files = sorted(self.info.files.items())
        self.fingerprint = f"infer-{hashlib.sha256(repr(files).encode()).hexdigest()[:12]}"
        self.fork_server = fork_server_of(language_model, self.info.name)
        self.grammar_trials = grammar_trials_of(self.fork_server)
        self.tokenizers: TokenizerPool = LocalTokenizer(language_model)
        if self.fork_server is not None and model.in_workers:
            self.tokenizers = ForkedTokenizer(self.fork_server)
        self.not_ready_reason: str | None = "the self-test of tokenizer and chat template has not ended"
        self.draining = False
        self.admission = PromptAdmission(limits, clock)
        self.admission.seed(model.speeds)
        self._streams: dict[str, TokenStream] = {}  # id of the engine's request → whose it is
        self._deliver_to = self._deliver  # one object, so that the engine client calls it once per step
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the response headers with the queue length, for load balancers."""
        return [(b"x-infer-queue", b"%d" % self.waiting_requests)]

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start delivering outputs to the event loop `loop`; call once."""
        self._loop = loop
        self.self_test_task = loop.create_task(self._self_test())
        self._check_engine()

    def warmup(self) -> None:
        """Generate a few tokens before the first request; call before `start`."""
        if not self.model.in_workers:
            self.admission.seed(warm_up(self.language_model))

    def open(self, requests: Sequence[Request], *, timeout: float, stepwise: bool) -> TokenStream:
        """Submit the prompts of one HTTP request and return their stream.

        `stepwise`: wake the reader at each engine step, not only at the end. Raises `InputError`, or
        `OverloadedError` with the seconds after which to try again.
        """
        tokens = sum(len(request.prompt) for request in requests)
        tenant, priority = requests[0].tenant, requests[0].priority
        self.check_admission(
            timeout=timeout, priority=priority, requests=len(requests), tokens=tokens, tenant=tenant
        )
        stream = TokenStream(self, requests, timeout=timeout, stepwise=stepwise)
        for request in requests:
            self.admission.add(request.id, tenant, priority, len(request.prompt))
        try:
            for request in requests:
                self.engine_client.submit(request, self._deliver_to, replay=not stepwise)
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
        """Raise `OverloadedError` or `NotReadyError` if these requests would be refused now.

        With the default sizes it checks the smallest possible request, before its text is tokenized.
        """
        if self.draining:
            raise NotReadyError("the server is stopping")
        try:
            self.admission.check(timeout, priority, requests, tokens, tenant)
        except OverloadedError:
            self.metrics.rejected("overloaded")
            raise

    @property
    def failure(self) -> BaseException | None:
        return self.engine_client.failure

    @property
    def healthy(self) -> bool:
        """True while the engine runs and its current step is not stuck."""
        stuck = bool(self._streams) and self.clock() - self.engine_client.beat > self.limits.wedged_seconds
        return self.failure is None and not stuck

    @property
    def ready(self) -> bool:
        """True when a request would run now."""
        return self.not_ready_reason is None and self.healthy and self.engine_client.ready

    @property
    def idle(self) -> bool:
        return not self._streams

    @property
    def waiting_requests(self) -> int:
        return self.admission.queue.requests

    @property
    def waiting_tokens(self) -> int:
        return self.admission.queue.tokens

    @property
    def running(self) -> int:
        """Number of requests between their first and last token."""
        return len(self._streams) - self.waiting_requests

    @property
    def waiting(self) -> int:
        return self.waiting_requests

    @property
    def beat(self) -> float:
        return self.engine_client.beat

    def drain(self) -> None:
        """Admit no further requests; admitted ones continue."""
        self.draining = True

    def stop(self, error: InferError) -> None:
        """Fail every stream; the engine ends when its predictor is closed."""
        self.draining = True
        if self._timer is not None:
            self._timer.cancel()
        for stream in set(self._streams.values()):
            stream.fail(error)
        for part in (self.grammar_trials, self.tokenizers, self.fork_server):
            if part is not None:
                part.close()

    async def _self_test(self) -> None:
        try:
            await self.tokenizers.self_test(chat=self.template is not None)
            self.not_ready_reason = None
        except InferError as error:
            self.not_ready_reason = str(error)
            log.error("%s is not ready: %s", self.info.name, error)

    def _check_engine(self) -> None:
        """Check the engine periodically: a dead one delivers nothing, so fail its streams here."""
        if self.failure is not None:
            log.critical("the engine of %s died", self.info.name, exc_info=self.failure)
            self.stop(error_for_requests(self.failure))
        elif self._loop is not None:
            self._timer = self._loop.call_later(LOOK_SECONDS, self._check_engine)

    def _deliver(self, outputs: list[Output]) -> None:
        """Pass one step's outputs to the event loop; called on the engine's thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._fan_out, outputs, self.clock())

    def _fan_out(self, outputs: list[Output], when: float) -> None:
        for output in outputs:
            stream = self._streams.get(output.id)
            if stream is not None:
                stream.on_output(output, when)

    def on_first_token(self, request_id: str, when: float | None, began: float = 0.0) -> None:
        """Record the first token of a queued request, or its removal where `when` is None.

        `began`: the time of its admission.
        """
        self.admission.remove(request_id, when, began)

    def release(self, request_id: str, *, running: bool) -> None:
        """Forget a request of a closed stream; cancel it where it still runs."""
        if self._streams.pop(request_id, None) is not None and running:
            self.engine_client.cancel(request_id)
