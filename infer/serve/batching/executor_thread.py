"""A thread that takes batches, runs them on one executor and hands them back: one wake-up of the loop per batch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ...errors import DeadlineError, PoisonError, WorkerDiedError
from ..workers.quarantine import digest_of
from ..workers.supervisor import LostError, NotSentError, ended
from .batch_result import Outcome, Ran
from .executor import Executor
from .queue import Taken
from .queue_items import Entry
from .run_arrays import Arrays
from .wakeup import Bell

if TYPE_CHECKING:
    from .tensor_engine import Engine

log = logging.getLogger("infer.serve")
LOOK_SECONDS = 1.0
TOO_LATE = "in the queue, or would while it ran"


First = Callable[[Sequence[Entry], Ran], list[Arrays]]


class Lane:
    """`beat`: when it last looked; `running`: rows of its batch; `failure`: what it died of."""

    def __init__(self, engine: Engine, executor: Executor, number: int) -> None:
        self.engine, self.executor, self.number = engine, executor, number
        self.current: list[Entry] = []
        self.running, self.beat = 0, engine.clock()
        self.asleep = False
        self.failure: BaseException | None = None
        self._bell: Bell | None = None
        name = f"infer-{engine.predictor.name}-{number}"
        self.thread = threading.Thread(target=self._loop, name=name, daemon=True)

    @property
    def unwatched(self) -> bool:
        """Whether somebody else has to notice that its batch hangs."""
        return not self.executor.watched

    def start(self) -> None:
        self._bell = Bell()
        self.thread.start()

    def ring(self) -> None:
        """Look now."""
        if self._bell is not None:
            self._bell.ring()

    def look(self) -> None:
        """The same, on the loop's thread."""
        self.ring()

    def stop(self) -> None:
        """The engine stops, says the loop's thread."""
        self.ring()

    def _loop(self) -> None:
        engine = self.engine
        try:
            while (taken := self._next()) is not None:
                for entry in taken.expired:
                    engine.call_home(engine.expire, entry.ticket, TOO_LATE)
                if taken.entries:
                    engine.call_home(engine.deliver, self._execute(taken))
        except BaseException as error:  # noqa: BLE001 - whatever ended the thread must reach health and every caller
            self._died(error)
        finally:
            if self._bell is not None:
                self._bell.close()

    def _died(self, error: BaseException) -> None:
        engine = self.engine
        log.critical("the engine of %s died", engine.predictor.name, exc_info=error)
        self.failure = error
        engine.call_home(engine.stop, ended(error))

    def _next(self) -> Taken | None:
        """Blocks until there is something to do; None when stopped."""
        engine = self.engine
        while True:
            with engine.lock:
                if engine.stopping:
                    self.running, self.current = 0, []
                    return None
                taken = self._take()
                if taken.entries or taken.expired:
                    return taken
                self.asleep = True
            self._pause(min(taken.wait or LOOK_SECONDS, LOOK_SECONDS))

    def _take(self) -> Taken:
        """What is next, for a caller who holds the lock; who sleeps is woken for the rest."""
        engine = self.engine
        taken = engine.batcher.take(self.number)
        self.beat = engine.clock()
        self.current = taken.entries
        self.running = sum([entry.rows for entry in taken.entries])
        if taken.entries or taken.expired:
            self.asleep = False
            if engine.batcher.requests and (other := engine.lanes.sleeper()) is not None:
                other.ring()
        return taken

    def _pause(self, seconds: float) -> None:
        """Until somebody rings, the worker says something, or the time is over."""
        if self._bell is not None:
            self._bell.wait(seconds, self.executor.fileno())
        self.asleep = False
        self._look()

    def _look(self) -> None:
        try:
            self.executor.look()
        except LostError as error:
            self._restart(error)

    def _restart(self, error: LostError) -> None:
        """Raises `HopelessError` when that does not help."""
        engine = self.engine
        if not engine.stopping:
            log.error("a worker of %s died: %s", engine.predictor.name, error)
            engine.call_home(engine.metrics.worker_deaths.inc)
            self.executor.restart(lambda: engine.stopping)

    def _execute(self, taken: Taken) -> Ran:
        return self._complete(Ran(taken.entries, [], self.engine.clock(), taken.reason))

    def _complete(self, ran: Ran, first: First | None = None) -> Ran:
        try:
            ran.outcomes = list((first or self._run)(ran.entries, ran))
        except Exception as error:  # noqa: BLE001 - a model may raise anything
            ran.entries = [one for entry in ran.entries for one in entry.apart()]
            ran.outcomes = self._outcomes(ran.entries, ran, partial(fail, error))
        self._done(ran)
        return ran

    def _done(self, ran: Ran) -> None:
        engine = self.engine
        seconds = engine.clock() - ran.started
        ran.worker, ran.began = self.executor.pid, self.executor.began
        with engine.lock:
            engine.batcher.finish(0.0 if ran.reason == "retry" else seconds, self.number)

    def _outcomes(self, entries: Sequence[Entry], ran: Ran, first: First | None = None) -> list[Outcome]:
        """Run them; when that fails, their halves, so that a bad request fails and its neighbours don't.

        `first`: instead of the first run of all of them.
        """
        try:
            return list((first or self._run)(entries, ran))
        except NotSentError as error:
            self._restart(error)
            if self.engine.stopping:
                raise WorkerDiedError("the model's process died") from error
            return self._outcomes(entries, ran)
        except LostError as error:
            ran.reason = "retry"
            if len(entries) == 1 and entries[0].deaths:
                self.executor.excuse()
            self._restart(error)
            return [self._again(entry, ran) for entry in entries]
        except Exception as error:  # noqa: BLE001 - a model may raise anything; each request gets its own reason
            if len(entries) == 1:
                return [error]
            ran.reason, half = "retry", len(entries) // 2
            return self._outcomes(entries[:half], ran) + self._outcomes(entries[half:], ran)

    def _again(self, entry: Entry, ran: Ran) -> Outcome:
        """Once more, alone, after its worker died; whoever is there at two deaths is guilty."""
        engine = self.engine
        entry.deaths += 1
        if entry.deaths > 1:
            engine.quarantine.add(digest_of(entry.inputs))
            return PoisonError("the model's process died of this request, twice")
        if entry.deadline <= engine.clock():
            return DeadlineError(
                "the time of the request ran out while the model's process was started again"
            )
        if engine.stopping or entry.ticket.settled:
            return WorkerDiedError("the model's process died")
        return self._outcomes([entry], ran)[0]

    def _run(self, entries: Sequence[Entry], ran: Ran) -> list[Arrays]:
        inputs = self._join(entries, ran)
        try:
            outputs, ran.compute = self.executor.run(inputs)
        finally:
            inputs.clear()  # an error's traceback would keep them
        return self._cut(outputs, entries, ran)

    def _join(self, entries: Sequence[Entry], ran: Ran) -> Arrays:
        began = self.engine.clock()
        try:
            inputs, ran.padding = self.engine.layout.join(
                [entry.inputs for entry in entries], self.executor.new
            )
        except BaseException:
            self.executor.abandon()
            raise
        ran.assemble = self.engine.clock() - began
        return inputs

    def _cut(self, outputs: Arrays, entries: Sequence[Entry], ran: Ran) -> list[Arrays]:
        computed = self.engine.clock()
        pieces = self.engine.layout.cut(outputs, [entry.sizes for entry in entries])
        ran.cut = self.engine.clock() - computed
        return pieces


def fail(error: Exception, entries: Sequence[Entry], ran: Ran) -> list[Arrays]:
    """The outcome of a run that failed before."""
    raise error
