"""Responses that are kept in memory for later requests: bounded, fair across tenants, least recently used go first."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec

OVERHEAD = 1024  # bytes of an entry beside its JSON


class StoredResponse(msgspec.Struct, frozen=True):
    """A response as JSON, and the items of its conversation as JSON: those of the request, then those of the reply.

    `given`: number of the former, with those of the responses before it.
    """

    body: bytes
    items: bytes
    given: int

    def conversation(self) -> list[dict[str, Any]]:
        return list(msgspec.json.decode(self.items))

    @property
    def size(self) -> int:
        return len(self.body) + len(self.items) + OVERHEAD


class ResponseStore:
    """Responses of all tenants, of which each sees its own alone.

    Beyond `max_bytes` or `max_count` the tenant that holds most bytes loses the one that it used longest ago.
    """

    def __init__(self, max_bytes: int, max_count: int) -> None:
        self.max_bytes, self.max_count = max_bytes, max_count
        self.bytes = self.count = 0
        self._tenants: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._held: dict[str, int] = {}  # bytes of each tenant

    @property
    def keeps(self) -> bool:
        return self.max_bytes > 0 and self.max_count > 0

    def put(self, tenant: str, id: str, response: StoredResponse) -> None:
        """Keep a response, unless it alone is beyond the limit."""
        if response.size > self.max_bytes or not self.keeps:
            return
        self._tenants.setdefault(tenant, OrderedDict())[id] = response
        self._count(tenant, response.size, 1)
        while self.bytes > self.max_bytes or self.count > self.max_count:
            largest = max(self._held, key=self._held.__getitem__)
            self.remove(largest, next(iter(self._tenants[largest])))

    def get(self, tenant: str, id: str) -> StoredResponse | None:
        own = self._tenants.get(tenant)
        if own is None or id not in own:
            return None
        own.move_to_end(id)
        return own[id]

    def remove(self, tenant: str, id: str) -> bool:
        """Forget a response; return whether the tenant had it."""
        own = self._tenants.get(tenant)
        response = own.pop(id, None) if own is not None else None
        if response is None:
            return False
        self._count(tenant, -response.size, -1)
        return True

    def _count(self, tenant: str, size: int, number: int) -> None:
        self.bytes += size
        self.count += number
        self._held[tenant] = self._held.get(tenant, 0) + size
        if not self._tenants[tenant]:
            del self._tenants[tenant], self._held[tenant]
