"""Prompts of one model that wait for their first token, counted by tenant, and their admission by predicted wait."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...errors import OverloadedError
from ...llm.engine.scheduling.engine_limits import EngineLimits, is_beyond_share
from ..batching.latency_model import MAX_OUTLIERS, MEMORY, OUTLIER
from ..limits import ServeLimits

TAIL = 3.0  # margin of waits for first tokens: short prompts overtake, so that few wait much longer than the mean
AGING = EngineLimits().aging  # seconds of waiting that are worth one step of priority


@dataclass(frozen=True, slots=True, eq=False)
class QueuedPrompt:
    """A queued prompt.

    `rank`: the engine's order within a tenant; `predicted_seconds`: time to its first token.
    """

    tenant: str
    rank: float
    tokens: int
    predicted_seconds: float


class PromptQueue:
    """Mirror of the engine's queue; `requests` and `tokens` are totals of all tenants."""

    def __init__(self) -> None:
        self.requests = self.tokens = 0
        self._waiting: set[QueuedPrompt] = set()
        self._tenants: dict[str, tuple[int, int]] = {}  # requests and tokens of each that waits

    def add(self, waiter: QueuedPrompt) -> None:
        self._waiting.add(waiter)
        self._count(waiter, 1)

    def remove(self, waiter: QueuedPrompt) -> None:
        self._waiting.remove(waiter)
        self._count(waiter, -1)

    def tokens_ahead(self, tenant: str, rank: float, tokens: int = 0) -> int:
        """Return the prompt tokens that run before a prompt of `tokens` that arrives now.

        These are its tenant's prompts with a lower rank, and at most as many tokens of each other tenant,
        since tenants have equal shares.
        """
        own = sum([w.tokens for w in self._waiting if w.tenant == tenant and w.rank <= rank])
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


class ThroughputModel:
    """Throughput of work that ends at any time: ratio of two running means."""

    def __init__(self) -> None:
        self._seen, self._work, self._time = 0, 0.0, 0.0

    def observe(self, work: float, seconds: float) -> None:
        if self._seen > MAX_OUTLIERS:
            seconds = min(seconds, OUTLIER * OUTLIER * self.seconds(max(work, self._work)))
        self._seen += 1
        weight = max(1 / self._seen, 1 / MEMORY)
        self._work += weight * (work - self._work)
        self._time += weight * (seconds - self._time)

    def seconds(self, work: float) -> float:
        """Predict the seconds of this work; 0 before the first observation."""
        return work * self._time / self._work if self._work else 0.0


class WaitErrorModel:
    """Prediction error of queue wait: proportional to the wait, or a + b·wait by least squares if that is less.

    Much of the error of a short wait is the step that was running. A predicted wait of 0 has no error.
    """

    def __init__(self) -> None:
        self._seen = 0
        self._means = [0.0] * 4  # of predicted wait, error, wait², wait x error

    def observe(self, predicted: float, seconds: float) -> None:
        """Observe predicted seconds (0: no prediction) and measured seconds."""
        if predicted <= 0:
            return
        self._seen += 1
        weight, off = max(1 / self._seen, 1 / MEMORY), min(abs(seconds - predicted), OUTLIER * predicted)
        now = predicted, off, predicted * predicted, predicted * off
        self._means = [mean + weight * (one - mean) for mean, one in zip(self._means, now, strict=True)]

    def caution(self, predicted: float) -> float:
        """Return the margin in seconds to add to a predicted wait where being late has a cost."""
        mean, off, square, product = self._means
        if not mean:
            return 0.0
        share, variance = off / mean, square - mean * mean
        each = (product - mean * off) / variance if variance > 1e-6 * square else share
        each = min(max(each, 0.0), share)
        return TAIL * min(share * predicted, off + each * (predicted - mean))


class PromptAdmission:
    """Admission of prompts to `queue`, the prompts that were submitted and have no first token.

    `prefill_rate`: prompt tokens until their first token, whatever holds them up; `wait_error`: margin for predictions.
    """

    def __init__(self, limits: ServeLimits, clock: Callable[[], float]) -> None:
        self.queue, self.prefill_rate, self.wait_error = PromptQueue(), ThroughputModel(), WaitErrorModel()
        self._limits, self._clock = limits, clock
        self._last_start = -math.inf

    def seed(self, measured: Iterable[tuple[float, float]]) -> None:
        """Initialize the prefill-rate estimate from (tokens, seconds) of warm-up runs."""
        for tokens, seconds in measured:
            self.prefill_rate.observe(tokens, seconds)

    def predicted_wait(self, priority: int = 0, tokens: int = 0, tenant: str = "") -> float:
        """Return the predicted seconds to the first token of a prompt that arrives now.

        That is the queued tokens ahead of it plus its own `tokens`, over the measured prefill rate; with
        `tokens` 0 it is the wait in the queue alone.
        """
        ahead = self.queue.tokens_ahead(tenant, self._clock() + AGING * priority, tokens)
        return self.prefill_rate.seconds(ahead + tokens)

    def check(self, timeout: float, priority: int, requests: int, tokens: int, tenant: str) -> None:
        """Raise `OverloadedError` if these requests would exceed a limit or wait too long for a first token."""
        limits = self._limits
        wait, allowed = self.predicted_wait(priority, tenant=tenant), min(timeout, limits.max_start_seconds)
        cautious = wait + self.wait_error.caution(wait)
        if self.queue.is_full(tenant, requests, tokens, limits):
            raise OverloadedError("the queue is full", retry_after=wait)
        if cautious > allowed:
            message = (
                f"time to first token of {wait:.2f} to {cautious:.2f} s exceeds the {allowed:.2f} s limit"
            )
            raise OverloadedError(message, retry_after=wait)

    def add(self, tenant: str, priority: int, tokens: int) -> QueuedPrompt:
        """Queue an admitted prompt; `remove` takes it out."""
        predicted = self.predicted_wait(priority, tokens, tenant)
        prompt = QueuedPrompt(tenant, self._clock() + AGING * priority, tokens, predicted)
        self.queue.add(prompt)
        return prompt

    def remove(self, prompt: QueuedPrompt, first_token: float | None, began: float) -> None:
        """Remove a prompt with its first token at this clock time, or without one.

        `began`: time of its admission.
        """
        self.queue.remove(prompt)
        if first_token is not None:
            self.wait_error.observe(prompt.predicted_seconds, first_token - began)
            self.prefill_rate.observe(prompt.tokens, max(first_token - max(self._last_start, began), 0.0))
            self._last_start = first_token
