"""Places for work of several clients, which take turns."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..errors import OverloadedError


class ClientSlots:
    """Semaphore of `places` slots, at most `each` for one client, of which at most `waiting` requests wait.

    Clients take turns. `latest_first`: the latest request of a client goes first, so that a burst delays none.
    `what`, `where`: name of the work and the request's field, for messages.
    """

    def __init__(
        self, places: int, *, each: int, waiting: int, what: str, where: str, latest_first: bool = False
    ) -> None:
        self._places, self._each, self._max_waiting = places, each, waiting
        self._what, self._where = what, where
        self._next = -1 if latest_first else 0
        self._running: dict[str, int] = {}
        self._waiting: OrderedDict[str, list[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, client: str, seconds: float | None = None) -> AsyncIterator[None]:
        """Hold a slot. Raises `OverloadedError` when too many requests wait, or after `seconds` of waiting."""
        await self.take(client, seconds)
        try:
            yield
        finally:
            self.release(client)

    async def take(self, client: str, seconds: float | None = None) -> None:
        """Acquire a slot, as `turn` does; the caller releases it."""
        if self.try_acquire(client):
            return
        mine = self._waiting.setdefault(client, [])
        if len(mine) >= self._max_waiting:
            raise OverloadedError(f"too many {self._what} of this client wait", where=self._where)
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
                raise OverloadedError(f"other {self._what} take long", where=self._where) from error
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
                if not mine:
                    del self._waiting[waiting]
                return

    def _forget(self, client: str, future: asyncio.Future[None]) -> None:
        mine = self._waiting.get(client, [])
        if future in mine:
            mine.remove(future)
        if not mine:
            self._waiting.pop(client, None)
