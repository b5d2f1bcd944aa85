"""Prompts of one model that wait for their first token: whose they are, and what goes before another one."""

from __future__ import annotations

from typing import NamedTuple

from ...llm.engine.quota import is_beyond_share
from ..limits import ServeLimits


class Waiter(NamedTuple):
    """`rank`: as the engine's, within its tenant; `told`: seconds foretold until its first token."""

    tenant: str
    rank: float
    tokens: int
    told: float


class Line:
    """`requests` and `tokens`: of all tenants together."""

    def __init__(self) -> None:
        self.requests = self.tokens = 0
        self._waiting: dict[str, Waiter] = {}  # by the engine's id
        self._tenants: dict[str, tuple[int, int]] = {}  # requests and tokens of each that waits

    def enter(self, id: str, waiter: Waiter) -> None:
        self._waiting[id] = waiter
        self._count(waiter, 1)

    def leave(self, id: str) -> Waiter:
        waiter = self._waiting.pop(id)
        self._count(waiter, -1)
        return waiter

    def ahead(self, tenant: str, rank: float, tokens: int = 0) -> int:
        """Tokens that are read before a prompt of so many that comes now: those of its tenant that rank before it, and
        of each other tenant at most as many, since tenants have equal shares."""
        own = sum([w.tokens for w in self._waiting.values() if w.tenant == tenant and w.rank <= rank])
        others = [theirs for name, (_, theirs) in self._tenants.items() if name != tenant]
        return own + sum([min(theirs, own + tokens) for theirs in others])

    def is_full(self, tenant: str, requests: int, tokens: int, limits: ServeLimits) -> bool:
        """Tell if there is no place for so much more of a tenant; who has less than its part still finds one."""
        own, theirs = self._tenants.get(tenant, (0, 0))
        tenants = len(self._tenants) + (tenant not in self._tenants)
        return is_beyond_share(
            own + requests, self.requests + requests, tenants, limits.max_queue_requests
        ) or is_beyond_share(theirs + tokens, self.tokens + tokens, tenants, limits.max_queue_tokens)

    def _count(self, waiter: Waiter, sign: int) -> None:
        requests, tokens = self._tenants.get(waiter.tenant, (0, 0))
        self._tenants[waiter.tenant] = requests + sign, tokens + sign * waiter.tokens
        if not self._tenants[waiter.tenant][0]:
            del self._tenants[waiter.tenant]
        self.requests += sign
        self.tokens += sign * waiter.tokens
