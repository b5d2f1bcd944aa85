"""Prompts of one model that wait for their first token, counted by tenant."""

from __future__ import annotations

from typing import NamedTuple

from ...llm.engine.quota import is_beyond_share
from ..limits import ServeLimits


class QueuedPrompt(NamedTuple):
    """A queued prompt.

    `rank`: the engine's order within a tenant; `predicted_seconds`: predicted time to its first token.
    """

    tenant: str
    rank: float
    tokens: int
    told: float


class PromptQueue:
    """Mirror of the engine's queue; `requests` and `tokens` are totals of all tenants."""

    def __init__(self) -> None:
        self.requests = self.tokens = 0
        self._waiting: dict[str, QueuedPrompt] = {}  # by the engine's id
        self._tenants: dict[str, tuple[int, int]] = {}  # requests and tokens of each that waits

    def add(self, id: str, waiter: QueuedPrompt) -> None:
        self._waiting[id] = waiter
        self._count(waiter, 1)

    def remove(self, id: str) -> QueuedPrompt:
        waiter = self._waiting.pop(id)
        self._count(waiter, -1)
        return waiter

    def tokens_ahead(self, tenant: str, rank: float, tokens: int = 0) -> int:
        """Return the prompt tokens that run before a prompt of `tokens` that arrives now.

        These are its tenant's prompts with a lower rank, and at most as many tokens of each other tenant,
        since tenants have equal shares.
        """
        own = sum([w.tokens for w in self._waiting.values() if w.tenant == tenant and w.rank <= rank])
        others = [theirs for name, (_, theirs) in self._tenants.items() if name != tenant]
        return own + sum([min(theirs, own + tokens) for theirs in others])

    def is_full(self, tenant: str, requests: int, tokens: int, limits: ServeLimits) -> bool:
        """Return True if the limits leave no room for this tenant's requests and tokens.

        A tenant with less than its fair share is still admitted.
        """
        own, theirs = self._tenants.get(tenant, (0, 0))
        tenants = len(self._tenants) + (tenant not in self._tenants)
        return is_beyond_share(
            own + requests, self.requests + requests, tenants, limits.max_queue_requests
        ) or is_beyond_share(theirs + tokens, self.tokens + tokens, tenants, limits.max_queue_tokens)

    def _count(self, waiter: QueuedPrompt, sign: int) -> None:
        requests, tokens = self._tenants.get(waiter.tenant, (0, 0))
        self._tenants[waiter.tenant] = requests + sign, tokens + sign * waiter.tokens
        if not self._tenants[waiter.tenant][0]:
            del self._tenants[waiter.tenant]
        self.requests += sign
        self.tokens += sign * waiter.tokens
