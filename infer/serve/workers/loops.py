"""Worker loops: of a tensor model, and of a language model.

One thread receives, runs and answers batches of a tensor model. Of a language model one thread runs the engine, another
one reads messages, and grammars are compiled in threads of their own, never in the engine's.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ...errors import InferError
from ...llm.engine.engine_thread import Submission
from ...llm.engine.requests import Output, Request
from ...llm.text.grammar.grammar_request import GrammarLimits
from ...process.channel import Channel, ClosedError
from ...process.error_messages import ErrorMessage, encode_error
from ..batching.collate import Arrays
from ..served_model import ServedModel
from .messages import (
    BatchDone,
    CancelRequest,
    CompileGrammar,
    EngineOutputs,
    EngineStatus,
    FromWorker,
    GrammarCompiled,
    Heartbeat,
    LoadModel,
    RequestRejected,
    RunBatch,
    ShutDown,
    SubmitRequest,
    ToWorker,
)
from .self_test import GoldenInputTest, GoldenPromptTest
from .shared_memory import SharedBuffer

if TYPE_CHECKING:
    from ...llm.llm import LanguageModel

log = logging.getLogger("infer.serve.workers")
BEAT_SECONDS = 1.0
PULSE_SECONDS = 0.5
COMPILING = 2  # grammars at a time


def run_tensor_loop(model: ServedModel, channel: Channel[Any], buffers: list[SharedBuffer]) -> int:
    """Serve until told to end or the self-test fails; return the exit code.

    Raises `ClosedError` when the server process is gone.
    """
    steps, golden = 0, GoldenInputTest(model.info, model.run)
    while True:
        asked = channel.receive(BEAT_SECONDS)
        if asked is None:
            try:
                golden.run_if_due()
            except Exception:
                log.critical("the golden inputs fail", exc_info=True)
                return 4
            channel.send(Heartbeat(steps))
        elif isinstance(asked, RunBatch):
            steps += 1
            channel.send(_run_batch(model.run, asked, buffers[asked.buffer]))
            golden.timer.restart()
        elif not isinstance(asked, LoadModel):
            model.close()
            return 0


def _run_batch(
    run: Callable[[Arrays], Arrays], asked: RunBatch, buffer: SharedBuffer
) -> BatchDone | ErrorMessage:
    buffer.reset(asked.used)
    try:
        inputs = {placed[0]: buffer.view(placed) for placed in asked.inputs}
        began = time.monotonic()
        outputs = run(inputs)
        seconds = time.monotonic() - began
        return BatchDone([buffer.write(name, array) for name, array in outputs.items()], seconds, began)
    except Exception as error:  # noqa: BLE001 - a model may raise anything; the worker goes on
        message = encode_error(error)
        if not message.kind:
            log.exception("a batch failed")
        return message
    finally:
        buffer.base = None


def run_llm_loop(language_model: LanguageModel, close: Callable[[], None], channel: Channel[Any]) -> int:
    """Serve until told to end, the engine dies or its self-test fails; return the exit code.

    Raises `ClosedError` when the server process is gone.
    """
    worker = LLMWorker(language_model, channel)
    due, golden = 0.0, GoldenPromptTest(worker.engine_client)
    while worker.engine_client.failure is None:
        if (now := time.monotonic()) >= due:
            due = now + PULSE_SECONDS
            try:
                golden.run_if_due()
            except InferError as error:
                log.critical("%s", error)
                return 4
            channel.send(EngineStatus(worker.beat, worker.engine_client.stats(), golden.answering))
        message = channel.receive(due - now)
        if isinstance(message, ShutDown):
            close()
            return 0
        worker.handle(message)
    return 1


class LLMWorker:
    """Message handling around the engine thread of one language model."""

    def __init__(self, language_model: LanguageModel, channel: Channel[Any]) -> None:
        self._language_model, self._channel = language_model, channel
        self.engine_client = language_model.engine_client
        self._compilers = ThreadPoolExecutor(COMPILING, thread_name_prefix="grammar")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long-grammar")
        self._deliver_to = self._deliver  # one object, so that the engine client calls it once per step

    @property
    def beat(self) -> float:
        return self.engine_client.beat if self.engine_client.running else time.monotonic()

    def handle(self, message: ToWorker | None) -> None:
        """Handle one message of the server; None is ignored."""
        if isinstance(message, SubmitRequest):
            self._submit(message.request)
        elif isinstance(message, CancelRequest):
            self.engine_client.cancel(message.id)
        elif isinstance(message, CompileGrammar):
            long = message.tried[1] > GrammarLimits().long_seconds
            (self._long if long else self._compilers).submit(self._check, message)

    def _submit(self, request: Request) -> None:
        """Submit a request; one with a grammar is reserved, so that it can be cancelled, until that is compiled."""
        try:
            if (grammar := request.grammar) is None:
                self.engine_client.submit(request, self._deliver_to)
            else:
                submission = self.engine_client.reserve(request, self._deliver_to)
                self._compilers.submit(self._compile, submission, grammar)
        except Exception as error:  # noqa: BLE001 - the server reports it
            self._refuse(request.id, error)

    def _compile(self, submission: Submission, grammar: dict[str, Any]) -> None:
        """Compile the request's grammar into the engine's cache, then admit it; runs in a pool thread."""
        try:
            self._language_model.check_grammar(grammar)
            if (grammars := self._language_model.grammars) is not None:
                submission.held = grammars.open(grammar)
            self.engine_client.admit(submission)
        except Exception as error:  # noqa: BLE001 - the server reports it
            if self.engine_client.withdraw(submission):
                self._refuse(submission.request.id, error)

    def _refuse(self, id: str, error: Exception) -> None:
        if self.engine_client.failure is None:
            self._send(RequestRejected(id, encode_error(error)))

    def _check(self, asked: CompileGrammar) -> None:
        self._send(GrammarCompiled(asked.number, _reason(self._language_model.check_grammar, asked)))

    def _deliver(self, outputs: list[Output]) -> None:
        """Send the outputs of one step; called on the engine's thread.

        Outputs of a dead engine are dropped: the server decides about its requests.
        """
        if self.engine_client.failure is None:
            self._send(EngineOutputs(outputs))

    def _send(self, message: FromWorker) -> None:
        with contextlib.suppress(ClosedError):  # the server is gone, and this process about to be
            self._channel.send(message)


def _reason(check: Callable[[Any, tuple[int, float]], None], asked: CompileGrammar) -> ErrorMessage | None:
    try:
        check(asked.constraint, asked.tried)
    except Exception as error:  # noqa: BLE001 - of the library that compiles
        return encode_error(error)
    return None
