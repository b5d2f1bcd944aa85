"""Server side of a language model's worker, with the interface of `EngineThread`."""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from ...errors import InferError, NotReadyError, OverloadedError, WorkerDiedError
from ...llm.engine.requests import Deliver, Request
from ...llm.engine.stats import EngineStats
from ...process.channel import ClosedError
from ...process.error_messages import ErrorMessage, decode_error
from .crash_retry import RequestTable
from .messages import (
    CancelRequest,
    CompileGrammar,
    EngineOutputs,
    EngineStatus,
    FromWorker,
    GrammarCompiled,
    RequestRejected,
    SubmitRequest,
    ToWorker,
)
from .restart_policy import WorkerLostError, error_for_requests
from .supervisor import SupervisedWorker

log = logging.getLogger("infer.serve")
LOOK_SECONDS = 0.25
COMPILE_SECONDS = 30.0


class RemoteEngine:
    """Engine in a worker process.

    `beat`: monotonic time of its last step; `failure`: why the worker is not restarted, else None. One thread
    reads the worker's messages and restarts it when it dies; another one writes, so that a worker that does
    not read blocks no caller.
    """

    def __init__(self, worker: SupervisedWorker, *, name: str) -> None:
        self.worker, self.name = worker, name
        self.failure: BaseException | None = None
        self._table = RequestTable()
        self._outbox: queue.SimpleQueue[tuple[int, ToWorker] | None] = queue.SimpleQueue()
        self._beat, self._slowest = time.monotonic(), deque[float](maxlen=512)
        self._usual = 0.0  # seconds that the engine may be away between two turns
        self._away, self._turned = 0.0, 0.0  # the longest seen since it turned at `_turned`
        self._checks: dict[int, Future[ErrorMessage | None]] = {}  # grammars that the worker compiles
        self._numbers = itertools.count()
        while not isinstance(status := worker.receive(None, worker.watch.idle), EngineStatus):
            pass
        self._stats, self._answering = status.stats, status.answering
        self._threads = [
            threading.Thread(target=self._read, name=f"infer {name} out", daemon=True),
            threading.Thread(target=self._write, name=f"infer {name} in", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def ready(self) -> bool:
        return self.failure is None and self.worker.answering and self._answering

    @property
    def beat(self) -> float:
        return self._beat if self.worker.ready and self._table.sent else time.monotonic()

    @property
    def pid(self) -> int | None:
        return self.worker.pid

    @property
    def deaths(self) -> int:
        return self.worker.restarts.total

    def submit(self, request: Request, deliver: Deliver, *, replay: bool = False) -> None:
        """Submit a request, like `EngineThread.submit`; engine-side errors come as a `FailedOutput`.

        `replay`: see `RequestTable.add`. Raises `PoisonError` for a quarantined request.
        """
        if self.failure is not None:
            raise NotReadyError("the model's process died") from self.failure
        self._table.add(request, deliver, replay=replay)
        self._send_next()

    def cancel(self, id: str) -> None:
        if self._table.remove(id):
            self._send(CancelRequest(id))
        self._send_next()

    def stats(self) -> EngineStats:
        """Return the engine's counters, at most half a second old."""
        return self._stats

    def check_grammar(self, constraint: Mapping[str, Any], tried: tuple[int, float] = (0, 0.0)) -> None:
        """Compile the grammar in the worker; blocks. Raise `InputError` where it can't be enforced.

        `tried`: see `CompileGrammar`.
        """
        try:
            refused = self._compile(constraint, tried)
        except WorkerDiedError:  # meanwhile
            refused = self._compile(constraint, tried)
        if refused is not None:
            raise decode_error(refused)

    def _compile(self, constraint: Mapping[str, Any], tried: tuple[int, float]) -> ErrorMessage | None:
        """Return the worker's reply; raise `WorkerDiedError` when it died before it gave one."""
        deadline = time.monotonic() + COMPILE_SECONDS
        while not self.ready:
            if self.failure is not None or self.worker.closing or time.monotonic() > deadline:
                raise NotReadyError("the model's process is being started")
            time.sleep(LOOK_SECONDS)
        number, reply = next(self._numbers), Future[ErrorMessage | None]()
        self._checks[number] = reply
        self._send(CompileGrammar(number, dict(constraint), tried))
        try:
            return reply.result(COMPILE_SECONDS)
        except TimeoutError as error:
            raise OverloadedError("other grammars are being compiled", where="grammar") from error
        finally:
            self._checks.pop(number, None)

    def close(self) -> None:
        """End the worker, whatever it does; may be called twice."""
        self.worker.close()
        self._outbox.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(10)

    def _send(self, message: ToWorker) -> None:
        self._outbox.put((self._table.epoch, message))

    def _send_next(self) -> None:
        epoch, requests = self._table.take_pending()
        for request in requests:
            self._outbox.put((epoch, SubmitRequest(request)))

    def _write(self) -> None:
        while (item := self._outbox.get()) is not None:
            epoch, message = item
            with contextlib.suppress(ClosedError, WorkerLostError):  # the reader notices
                channel = self.worker.channel  # before the epoch is compared: never that of a later process
                if epoch == self._table.epoch:
                    channel.send(message)
                    if isinstance(message, SubmitRequest):
                        self._table.mark_written(message.request.id, epoch)

    def _read(self) -> None:
        worker = self.worker
        try:
            while not worker.closing:
                try:
                    with worker.channel_lock:
                        message = worker.receive(LOOK_SECONDS, worker.watch.idle)
                    self._take(message)
                    self._watch()
                except WorkerLostError as error:
                    self._lost(error)
        except BaseException as error:  # noqa: BLE001 - it must reach health and every caller
            log.critical("the engine of %s died", self.name, exc_info=error)
            self.failure = error
        finally:
            self._table.fail_all(
                error_for_requests(self.failure)
                if self.failure
                else WorkerDiedError("the model's process died")
            )

    def _take(self, message: FromWorker | None) -> None:
        if isinstance(message, EngineOutputs):
            self._beat = time.monotonic()
            self.worker.restarts.record_success()
            if self._table.deliver(message.outputs):
                self._send_next()
        elif isinstance(message, EngineStatus):
            self._count(message.beat)
            self._beat, self._stats = max(self._beat, message.beat), message.stats
            self._answering = message.answering
        elif isinstance(message, RequestRejected):
            error = decode_error(message.error)
            refused = error if isinstance(error, InferError) else InferError("the model failed")
            self._table.reject(message.id, refused)
            self._send_next()
        elif isinstance(message, GrammarCompiled) and (reply := self._checks.pop(message.number, None)):
            reply.set_result(message.error)

    def _count(self, beat: float) -> None:
        """Update the usual time between two steps; only steps that ended count.

        A step that hangs would otherwise raise its own timeout.
        """
        if beat > self._turned:
            self._slowest.append(self._away)
            self._usual = sorted(self._slowest)[int(0.99 * len(self._slowest))]
        self._away, self._turned = max(time.monotonic() - beat, 0.0), beat

    def _watch(self) -> None:
        """Raise `WorkerLostError` when a step takes far longer than steps usually do."""
        if not self._table.sent:
            self._beat = time.monotonic()
            return
        patience = max(self.worker.watch.batch, 10 * min(self._usual, self.worker.watch.batch))
        if time.monotonic() - self._beat > patience:
            with self.worker.channel_lock:
                raise self.worker.kill_hung(patience)

    def _lost(self, error: WorkerLostError) -> None:
        """Restart the worker and its requests; raise `RestartLimitError` when it died too often."""
        if self.worker.closing:
            return
        log.error("the worker of %s died: %s", self.name, error)
        blamed = self._table.on_worker_death()
        for number in list(self._checks):
            if (reply := self._checks.pop(number, None)) is not None:
                said = "the model's process died twice while it compiled the grammar"
                reply.set_exception(WorkerDiedError(said))
        if blamed:
            self.worker.restarts.blame_request(blamed)
        self.worker.restart(lambda: False)
        self._beat = time.monotonic()
        self._slowest.clear()
        self._away = self._turned = 0.0
        self._table.on_worker_restart()
        self._send_next()
