"""Responses that are kept in memory for later requests: bounded, fair across tenants, least recently used go first."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec

OVERHEAD, ID_OVERHEAD = 1024, 256  # bytes of an entry beside its JSON, and of each id that is found again


class StoredResponse(msgspec.Struct, frozen=True):
    """A response as JSON, and the items of its conversation as JSON: those of the request, then those of the reply.

    `given`: number of the former, with those of the responses before it; `new_ids`: of the items that those have not.
    """

    body: bytes
    items: bytes
    given: int
    new_ids: tuple[str, ...] = ()

    def conversation(self) -> list[dict[str, Any]]:
        return list(msgspec.json.decode(self.items))

    @property
    def size(self) -> int:
        return len(self.body) + len(self.items) + OVERHEAD + ID_OVERHEAD * len(self.new_ids)


class ResponseStore:
    """Responses of all tenants, of which each sees its own alone.

    Beyond `max_bytes` or `max_count` the tenant that holds most bytes loses the one that it used longest ago.
    """

    def __init__(self, max_bytes: int, max_count: int) -> None:
        self.max_bytes, self.max_count = max_bytes, max_count
        self.bytes = self.count = 0
        self._tenants: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._held: dict[str, int] = {}  # bytes of each tenant
        self._owners: dict[tuple[str, str], str] = {}  # tenant and id of an item → its response

    @property
    def keeps(self) -> bool:
        return self.max_bytes > 0 and self.max_count > 0

    def put(self, tenant: str, id: str, response: StoredResponse) -> None:
        """Keep a response, unless it alone is beyond the limit."""
        if response.size > self.max_bytes or not self.keeps:
            return
        self._tenants.setdefault(tenant, OrderedDict())[id] = response
        self._count(tenant, response.size, 1)
        for item in response.new_ids:
            self._owners.setdefault((tenant, item), id)
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
        for item in response.new_ids:
            if self._owners.get((tenant, item)) == id:
                del self._owners[tenant, item]
        return True

    def item(self, tenant: str, id: str) -> dict[str, Any] | None:
        """Return an item of the tenant's responses by its id."""
        owner = self._owners.get((tenant, id))
        response = None if owner is None else self.get(tenant, owner)
        items = response.conversation() if response is not None else []
        return next((item for item in items if item["id"] == id), None)

    def _count(self, tenant: str, size: int, number: int) -> None:
        self.bytes += size
        self.count += number
        self._held[tenant] = self._held.get(tenant, 0) + size
        if not self._tenants[tenant]:
            del self._tenants[tenant], self._held[tenant]
