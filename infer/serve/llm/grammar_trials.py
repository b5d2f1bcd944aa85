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
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from importlib.util import find_spec
from typing import Any

from msgspec import structs

from ...errors import GrammarError, InferError, InputError, NotReadyError, OverloadedError
from ...llm.text.grammar.grammar_request import GrammarLimits, read
from ...llm.text.grammar.grammar_trial import GrammarCost
from ...process.error_messages import ErrorMessage, decode_error
from ...process.fork_server import ChildDiedError, ForkServer
from ...process.spawn import describe_exit
from ..client_slots import ClientSlots
from ..text_jobs.messages import CompileTrial, FromTrial

QUICK, EACH = 3, 2  # processes at a time for the first try, and of one client
SLOW = 2  # for long ones, of one client one
QUICK_SECONDS = 0.25  # of CPU time
WALL = 2  # seconds on the clock, for each of CPU time, until a process is killed
COMPILING = 2  # in the model's process
WAIT_SECONDS = 30.0  # for a turn
WAITING = 128  # grammars of one client
KNOWN = 4096  # results that are kept
BURST_SECONDS, REFILL = 12.0, 0.2  # of long compilations of one client, and regained in a second


class GrammarTrials:
    """Trial compilations of one language model; used on the event loop only."""

    def __init__(self, fork_server: ForkServer, limits: GrammarLimits | None = None) -> None:
        self._fork_server, self._limits = fork_server, limits or GrammarLimits()
        self._known: OrderedDict[str, GrammarCost | InferError] = OrderedDict()
        self._under_way: dict[str, asyncio.Task[GrammarCost | InferError]] = {}
        slots = partial(
            ClientSlots, waiting=WAITING, what="grammars that are being compiled", where="grammar"
        )
        self._quick = slots(QUICK, each=EACH, latest_first=True)
        self._slow = slots(SLOW, each=1)
        # in the model's process, which has as many threads for each kind
        self._compiling, self._compiling_long = (
            slots(COMPILING, each=COMPILING, latest_first=True),
            slots(1, each=1),
        )
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

    async def compile(
        self, client: str, tried: GrammarCost, pool: Executor, check: Callable[[], None]
    ) -> None:
        """Have the model's process compile a grammar: `check` waits for it, in a thread.

        It keeps its client's place to its end, also when nobody waits for it. Long ones have a place of their own.
        """
        long = tried.seconds > self._limits.long_seconds
        slots = self._compiling_long if long else self._compiling
        await slots.take(client, WAIT_SECONDS)
        compiling = asyncio.get_running_loop().run_in_executor(pool, check)

        def ended(done: asyncio.Future[Any]) -> None:
            slots.release(client)
            _ = done.cancelled() or done.exception()  # read: nobody may wait for it any more

        compiling.add_done_callback(ended)
        await asyncio.shield(compiling)

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
            message = await child.ask(asked, WALL * asked.seconds + 1)
        except ChildDiedError as error:
            if (status := error.ended_with) is None or status >= 0:
                raise NotReadyError("the process that compiles grammars ended") from error
            if -status == signal.SIGPROF:
                raise TimeoutError from error
            how = f"ended its process ({describe_exit(status)}): it takes too much memory"
            raise GrammarError(f"compiling this {asked.kind} {how}", where=asked.kind) from error
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
