"""Heads of requests that came before, byte for byte: what parser, limits and router made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import InputError
from .framing import Chunked, Counted
from .routing import Route, Together, allowed
from .tenants import sharer_of

if TYPE_CHECKING:
    from .app import App, Endpoint
    from .wire import Wire

MOST_HEADS, LONGEST_HEAD = 1024, 2048  # remembered at a time; bytes
SMALL_BODY = 16 << 10  # bytes that are read as soon as the queue is asked whether it would take them
# Heads with one of these are new each time, or ask for what only the whole way does.
RARE = frozenset((b"x-request-id", b"traceparent", b"tracestate", b"expect", b"content-encoding"))


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """What a head says. `length`: bytes of the body that follows it; `timeout`: seconds; `together`: of the route,
    None where the head has no right to it, or the body is long; `tenant`: see `tenants.sharer_of`."""

    endpoint: Endpoint
    route: Route
    path: Mapping[str, str]
    headers: Mapping[bytes, bytes]
    length: int
    timeout: float
    together: Together | None
    tenant: str = ""


class Heads:
    """Those of requests that were well formed, by their bytes; all are forgotten when they become too many."""

    def __init__(self) -> None:
        self._known: dict[bytes, Known] = {}
        self.get = self._known.get

    def learn(self, head: bytes, wire: Wire, body: Counted | Chunked | None, *, keep_alive: bool) -> None:
        """Keep it if requests like it can be answered in one piece."""
        if len(head) > LONGEST_HEAD or not isinstance(body, Counted) or not keep_alive:
            return
        headers, scope = dict(wire.headers), wire.scope
        if scope["method"] != "POST" or not RARE.isdisjoint(headers):
            return
        app: App = wire.app  # type: ignore[assignment]
        found = app.find(scope)  # type: ignore[arg-type]
        if found is None or body.left > app.service.limits.max_body_bytes:
            return
        endpoint, route, path = found
        service = app.service
        try:
            timeout = allowed(headers) or service.limits.timeout_seconds
        except InputError:
            return
        admitted = route.open or service.keys is None or service.keys.admit(headers)
        together = route.together if admitted and body.left <= SMALL_BODY else None
        if len(self._known) >= MOST_HEADS:
            self._known.clear()
        tenant = sharer_of(service, headers) if together is not None else ""
        self._known[head] = Known(endpoint, route, path, headers, body.left, timeout, together, tenant)
