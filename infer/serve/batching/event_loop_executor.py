"""A lane whose batches run in another process: small ones are sent and answered by the event loop, without a thread.

Waking a thread and being woken by it costs more than a small batch. So the loop takes batches, sends them and listens
for their answers as long as nothing has to be waited for. Large batches, and all that is out of the ordinary, it hands
to the lane's thread, which gives the lane back when it has nothing more to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec

from ..workers.channel import ClosedError
from ..workers.replica import SilentError
from ..workers.supervisor import LostError
from .batch_result import Ran
from .executor import Executor
from .executor_thread import LOOK_SECONDS, TOO_LATE, First, Lane, fail
from .queue_items import Entry
from .run_arrays import Arrays

if TYPE_CHECKING:
    from .tensor_engine import Engine

SMALL_BATCH = 256 << 10  # bytes of inputs that are copied on the event loop


@runtime_checkable
class Near(Executor, Protocol):
    """What an `Executor` of such a lane has besides; see `worker.replica.Replica`."""

    def begin(self, inputs: Arrays) -> None: ...

    def finish(self) -> tuple[Arrays, float]: ...

    def poll(self) -> tuple[Arrays, float] | None: ...


class NearLane(Lane):
    """`_ran`: the batch that the loop runs. `_descriptor`: what it listens to, -1 while the thread has the lane.

    All but `ring` and what a thread is given is called on the loop's thread.
    """

    executor: Near

    def __init__(self, engine: Engine, executor: Near, number: int) -> None:
        super().__init__(engine, executor, number)
        self._ran: Ran | None = None
        self._descriptor = -1
        self._given: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._later: asyncio.TimerHandle | None = None

    @property
    def on_loop(self) -> bool:
        """The loop has it."""
        return self._descriptor >= 0

    def ring(self) -> None:
        self.engine.call_home(self.look)

    def look(self) -> None:
        if self.on_loop and self._ran is None:
            self._safely(self._begin)

    def stop(self) -> None:
        self._leave()
        super().ring()

    def _pause(self, seconds: float) -> None:
        """The thread has nothing more to do: the loop has the lane until it gives it back."""
        self.engine.call_home(self._safely, self._resume)
        while self._given is None and not self.engine.stopping and self._bell is not None:
            self._bell.wait(LOOK_SECONDS)
        given, self._given = self._given, None
        if given is not None:
            given()

    def _resume(self) -> None:
        loop = self.engine.home
        if self.engine.stopping:
            return
        self._descriptor = self.executor.fileno()
        if not self.on_loop:
            self._give(self._look)
            return
        loop.add_reader(self._descriptor, self._safely, self._heard)
        self._timer = loop.call_later(LOOK_SECONDS, self._safely, self._tick)
        self._begin()

    def _leave(self) -> None:
        self._ran = None
        for timer in (self._timer, self._later):
            if timer is not None:
                timer.cancel()
        self._timer = self._later = None
        if self.on_loop:
            self.engine.home.remove_reader(self._descriptor)
            self._descriptor = -1

    def _give(self, work: Callable[[], None]) -> None:
        self._leave()
        self._given = work
        super().ring()

    def _give_batch(self, ran: Ran, first: First | None = None) -> None:
        engine = self.engine
        self._give(lambda: engine.call_home(engine.deliver, self._complete(ran, first)))

    def _begin(self) -> None:
        """Take batches until one runs or nothing is left."""
        engine, more = self.engine, True
        while more:
            with engine.lock:
                taken = self._take()
                more = bool(taken.expired and not taken.entries)
                self.asleep = not taken.entries and not more
            for entry in taken.expired:
                engine.expire(entry.ticket, TOO_LATE)
            if taken.entries:
                self._run_near(Ran(taken.entries, [], engine.clock(), taken.reason))
            elif taken.wait is not None:
                self._look_in(taken.wait)

    def _look_in(self, seconds: float) -> None:
        """One timer looks at a batch that is delayed, however many come to it meanwhile."""
        loop, later = self.engine.home, self._later
        if later is not None and later.when() <= loop.time() + seconds:
            return
        if later is not None:
            later.cancel()
        self._later = loop.call_later(seconds, self._look_later)

    def _look_later(self) -> None:
        self._later = None
        self.look()

    def _run_near(self, ran: Ran) -> None:
        if sum([entry.size_bytes for entry in ran.entries]) > SMALL_BATCH:
            self._give_batch(ran)
            return
        try:
            inputs = self._join(ran.entries, ran)
            try:
                self.executor.begin(inputs)
            finally:
                inputs.clear()
        except Exception:  # noqa: BLE001 - the thread tries the same, and has the time to find out what is wrong
            self._give_batch(ran)
        else:
            self._ran = ran

    def _heard(self) -> None:
        ran = self._ran
        try:
            done = self.executor.poll()
            if ran is None or done is None:
                return
            outputs, ran.compute = done
            ran.outcomes = list(self._cut(outputs, ran.entries, ran))
        except Exception as error:  # noqa: BLE001 - a model may raise anything
            if ran is None:
                self._give(self._look)
            elif isinstance(error, ClosedError | LostError | SilentError | msgspec.DecodeError):
                self._give_batch(ran, self._finish)
            else:
                self._give_batch(ran, partial(fail, error))
            return
        del outputs, done
        self._ran = None
        self._done(ran)
        self.engine.deliver(ran)
        if self.on_loop:
            self._begin()

    def _finish(self, entries: Sequence[Entry], ran: Ran) -> list[Arrays]:
        outputs, ran.compute = self.executor.finish()
        return self._cut(outputs, entries, ran)

    def _tick(self) -> None:
        """A worker that is silent says so to nobody."""
        self._timer = self.engine.home.call_later(LOOK_SECONDS, self._safely, self._tick)
        if self._ran is None:
            self.beat = self.engine.clock()
        self._heard()

    def _safely(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:  # noqa: BLE001 - as in the thread
            self._died(error)
