"""Limit of the memory that the bodies of all requests take together."""

from __future__ import annotations

from ...errors import OverloadedError


class BodyMemory:
    """Count of the bytes of all request bodies in memory, as they arrive. `limit`, `held`: bytes."""

    def __init__(self, limit: int) -> None:
        self.limit, self.held = limit, 0


class BodyReservation:
    """Bytes of one request in a `BodyMemory`; `close` releases them."""

    def __init__(self, bodies: BodyMemory) -> None:
        self._bodies, self._mine = bodies, 0

    def take(self, size: int) -> None:
        """Reserve bytes. Raises `OverloadedError` when all bodies together would exceed the limit."""
        if self._bodies.held + size > self._bodies.limit:
            raise OverloadedError(f"request bodies in memory exceed the limit of {self._bodies.limit} bytes")
        self._bodies.held += size
        self._mine += size

    def close(self) -> None:
        self._bodies.held -= self._mine
        self._mine = 0
