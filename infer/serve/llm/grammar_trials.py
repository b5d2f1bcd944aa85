"""Trial compilation of clients' grammars in killable processes, before the model's process compiles them.

Every new grammar first gets `QUICK_SECONDS` of CPU time in one of a few processes. One that needs longer
waits in a second queue, where each client runs one at a time and has a budget of seconds per minute; one that
exceeds its time or memory is killed and refused. Results are cached, so that each grammar is tried once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import signal
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any

from msgspec import structs

from ...errors import GrammarError, InferError, InputError, NotReadyError, OverloadedError
from ...llm.text.grammar.grammar_request import GrammarLimits, read
from ...llm.text.grammar.grammar_trial import GrammarCost
from ..fork_server.client import ChildDiedError, ForkServer
from ..fork_server.messages import CompileTrial, FromTrial
from ..workers.messages import ErrorMessage, decode_error

QUICK, EACH = 3, 2  # processes at a time for the first try, and of one client
SLOW = 2  # for long ones, of one client one
QUICK_SECONDS = 0.25  # of CPU time
WALL = 2  # seconds on the clock, for each of CPU time, until a process is killed
WAIT_SECONDS = 30.0  # for a turn
WAITING = 128  # grammars of one client
KNOWN = 4096  # results that are kept
BURST_SECONDS, REFILL = 12.0, 0.2  # of long compilations of one client, and regained in a second


class ClientSlots:
    """Semaphore of `places` slots, at most `each` for one client, of which at most `waiting` requests wait.

    Clients take turns. `latest_first`: the latest request of a client goes first, so that a burst delays none.
    `what`: name of the work, for messages.
    """

    def __init__(
        self, places: int, *, each: int, waiting: int, what: str, latest_first: bool = False
    ) -> None:
        self._places, self._each, self._max_waiting, self._what = places, each, waiting, what
        self._next = -1 if latest_first else 0
        self._running: dict[str, int] = {}
        self._waiting: OrderedDict[str, list[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, client: str, seconds: float) -> AsyncIterator[None]:
        """Hold a slot. Raises `OverloadedError` when too many requests wait, or after `seconds` of waiting."""
        await self.take(client, seconds)
        try:
            yield
        finally:
            self.release(client)

    async def take(self, client: str, seconds: float) -> None:
        """Acquire a slot, as `turn` does; the caller releases it."""
        if self.try_acquire(client):
            return
        mine = self._waiting.setdefault(client, [])
        if len(mine) >= self._max_waiting:
            raise OverloadedError(f"too many {self._what} of this client wait", where="grammar")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        mine.append(future)
        try:
            async with asyncio.timeout(seconds):
                await future
        except BaseException as error:
            if future.done() and not future.cancelled():
                self.release(client)
            else:
                self._forget(client, future)
            if isinstance(error, TimeoutError):
                raise OverloadedError(f"other {self._what} take long", where="grammar") from error
            raise

    def try_acquire(self, client: str) -> bool:
        """Acquire a slot if one is free; return whether one was."""
        own = self._running.get(client, 0)
        if sum(self._running.values()) >= self._places or own >= self._each:
            return False
        self._running[client] = own + 1
        return True

    def release(self, client: str) -> None:
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        for waiting, mine in list(self._waiting.items()):
            mine[:] = [future for future in mine if not future.done()]
            if mine and self.try_acquire(waiting):
                mine.pop(self._next).set_result(None)
                self._waiting.move_to_end(waiting)  # behind the other clients
                return

    def _forget(self, client: str, future: asyncio.Future[None]) -> None:
        mine = self._waiting.get(client, [])
        if future in mine:
            mine.remove(future)
        if not mine:
            self._waiting.pop(client, None)


class GrammarTrials:
    """Trial compilations of one language model; used on the event loop only."""

    def __init__(self, fork_server: ForkServer, limits: GrammarLimits | None = None) -> None:
        self._fork_server, self._limits = fork_server, limits or GrammarLimits()
        self._known: OrderedDict[str, GrammarCost | InferError] = OrderedDict()
        self._under_way: dict[str, asyncio.Task[GrammarCost | InferError]] = {}
        what = "grammars that are being compiled"
        self._quick = ClientSlots(QUICK, each=EACH, waiting=WAITING, what=what, latest_first=True)
        self._slow = ClientSlots(SLOW, each=1, waiting=WAITING, what=what)
        self._spent: dict[str, tuple[float, float]] = {}  # seconds of a client, and when they were counted

    async def check(self, client: str, constraint: Mapping[str, Any]) -> GrammarCost:
        """Return the result of compiling `constraint`, from the cache where it is known.

        Raises `InputError` for a grammar that can't be read or enforced or takes too much time or memory, and
        `OverloadedError` when the client has too many slow ones.
        """
        kind, text = read(constraint, self._limits)
        key = hashlib.sha256(f"{kind}:{text}".encode()).hexdigest()
        result = self._known.get(key)
        if result is not None:
            self._known.move_to_end(key)
        while result is None:
            if theirs := self._under_way.get(key):
                result = await asyncio.shield(theirs)
                result = None if isinstance(result, OverloadedError) else result  # of another client
            else:
                task = asyncio.create_task(self._settle(client, key, CompileTrial(kind, constraint[kind])))
                self._under_way[key] = task
                result = await asyncio.shield(task)
        if isinstance(result, OverloadedError):
            raise result
        if isinstance(result, InferError):
            raise type(result)(result.message, where=result.where, hint=result.hint) from result
        return result

    def close(self) -> None:
        for task in self._under_way.values():
            task.cancel()

    async def _settle(self, client: str, key: str, asked: CompileTrial) -> GrammarCost | InferError:
        try:
            result: GrammarCost | InferError = await self._try(client, asked)
        except InferError as error:
            result = error
        finally:
            del self._under_way[key]
        if isinstance(result, GrammarCost | InputError):  # of others, the next try may end otherwise
            self._known[key] = result
            while len(self._known) > KNOWN:
                self._known.popitem(last=False)
        return result

    async def _try(self, client: str, asked: CompileTrial) -> GrammarCost:
        async with self._quick.turn(client, WAIT_SECONDS):
            with contextlib.suppress(TimeoutError):
                return await self._run(structs.replace(asked, seconds=QUICK_SECONDS))
        async with self._slow.turn(client, WAIT_SECONDS):
            self._check_budget(client)
            began, seconds = time.monotonic(), self._limits.compile_seconds
            try:
                return await self._run(structs.replace(asked, seconds=seconds, politely=True))
            except TimeoutError as error:
                raise GrammarError(
                    f"this {asked.kind} takes longer than {seconds:g} s to compile", where=asked.kind
                ) from error
            finally:
                self._spend(client, time.monotonic() - began)

    async def _run(self, asked: CompileTrial) -> GrammarCost:
        """Compile in a process of its own; raise `TimeoutError` after `asked.seconds` of CPU time."""
        child = await self._fork_server.child("trial", FromTrial)
        try:
            async with asyncio.timeout(WALL * asked.seconds + 1):
                await child.send(asked)
                message = await child.receive()
        except ChildDiedError as error:
            if (status := error.ended_with) is None or status >= 0:
                raise NotReadyError("the process that compiles grammars ended") from error
            if -status == signal.SIGPROF:
                raise TimeoutError from error
            how = signal.Signals(-status).name
            raise GrammarError(
                f"compiling this {asked.kind} ended its process ({how}): it takes too much memory",
                where=asked.kind,
            ) from error
        finally:
            child.close()
        if isinstance(message, ErrorMessage):
            found = decode_error(message)
            if isinstance(found, InferError):
                raise found
            raise GrammarError(f"this {asked.kind} can't be compiled", where=asked.kind) from found
        return message  # type: ignore[no-any-return]

    def _check_budget(self, client: str) -> None:
        spent, when = self._spent.get(client, (0.0, 0.0))
        left = spent - REFILL * (time.monotonic() - when)
        if left > BURST_SECONDS:
            raise OverloadedError(
                "this client's grammars exceed its compile-time budget",
                where="grammar",
                retry_after=(left - BURST_SECONDS) / REFILL,
            )

    def _spend(self, client: str, seconds: float) -> None:
        now = time.monotonic()
        spent, when = self._spent.pop(client, (0.0, now))
        self._spent[client] = max(spent - REFILL * (now - when), 0.0) + seconds, now
        while len(self._spent) > KNOWN:
            del self._spent[next(iter(self._spent))]


def grammar_trials_of(fork_server: ForkServer | None) -> GrammarTrials | None:
    """Return the trials of a model, or None without its tokenizer or the compiler package."""
    if fork_server is None or not fork_server.config.vocab_size or find_spec("llguidance") is None:
        return None
    return GrammarTrials(fork_server, fork_server.config.limits)
