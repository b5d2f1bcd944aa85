"""A served language model: its engine's thread makes tokens, the event loop routes them to requests."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Sequence

from ...errors import InferError, NotReadyError, OverloadedError
from ...llm.engine.requests import Request
from ...tasks.media_model import MediaModel
from ..limits import ServeLimits
from ..observability.llm_metrics import LLMMetrics
from ..served_model import ServedLanguageModel, ServedModel
from ..workers.restart_policy import error_for_requests
from ..workers.self_test import warm_up
from .grammar_trials import grammar_trials_of
from .prompt_queue import PromptAdmission
from .token_stream import OpenStreams, TokenStream
from .tokenizer_pool import fork_server_of, generator_tokenizer

log = logging.getLogger("infer.serve")
LOOK_SECONDS = 0.25


class LLMEngine:
    """Event-loop front end of one engine; every method runs on the event loop's thread.

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
        self.forms = language_model.forms  # an unknown name ends the start here
        self.context, self.start_tokens = language_model.context, language_model.start_tokens
        self.vocab_size, self.adapters = language_model.vocab_size, language_model.adapter_names
        self.media = MediaModel(self.info) if "preprocessing" in self.info.meta else None
        files = sorted(self.info.files.items())
        self.fingerprint = f"infer-{hashlib.sha256(repr(files).encode()).hexdigest()[:12]}"
        self.fork_server = fork_server_of(language_model, self.info.name)
        self.grammar_trials = grammar_trials_of(self.fork_server)
        self.tokenizers = generator_tokenizer(language_model, self.fork_server, in_workers=model.in_workers)
        self.not_ready_reason: str | None = "the self-test of tokenizer and chat template has not ended"
        self.draining = False
        self.admission = PromptAdmission(limits, clock)
        self.admission.seed(model.speeds)
        self.streams = OpenStreams(self.engine_client, self.admission, metrics, clock)
        self._timer: asyncio.TimerHandle | None = None

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the response headers with the queue length, for load balancers."""
        return [(b"x-infer-queue", b"%d" % self.waiting)]

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start delivering outputs to the event loop `loop`; call once."""
        self.streams.loop = loop
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
        try:
            stream = self.streams.open(requests, timeout=timeout, stepwise=stepwise)
        except InferError as error:
            self.metrics.rejected(error)
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
        except OverloadedError as error:
            self.metrics.rejected(error)
            raise

    @property
    def failure(self) -> BaseException | None:
        return self.engine_client.failure

    @property
    def healthy(self) -> bool:
        """True while the engine runs and its current step is not stuck."""
        stuck = bool(self.streams) and self.clock() - self.engine_client.beat > self.limits.wedged_seconds
        return self.failure is None and not stuck

    @property
    def ready(self) -> bool:
        """True when a request would run now."""
        return self.not_ready_reason is None and self.healthy and self.engine_client.ready

    @property
    def idle(self) -> bool:
        return not self.streams

    @property
    def running(self) -> int:
        """Number of requests between their first and last token."""
        return len(self.streams) - self.waiting

    @property
    def waiting(self) -> int:
        """Number of requests without a first token."""
        return self.admission.queue.requests

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
        self.streams.fail(error)
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
        elif self.streams.loop is not None:
            self._timer = self.streams.loop.call_later(LOOK_SECONDS, self._check_engine)
