"""Cache of request heads: the result of parser, limits, API keys and router, by the bytes of the head.

Heads that differ in the value of Content-Length alone are one head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.routing import Match

from ...errors import InputError
from ..api.kserve.kserve_response import HEADER_LENGTH
from ..api.kserve.kserve_types import InferRequest
from ..http.app import App, Endpoint, Scope
from ..http.http_protocol import HttpProtocol
from ..http.request_context import queue_tenant_of, requested_timeout
from ..http.request_life import RequestLife
from ..http.routing import Route

MAX_HEADS, MAX_HEAD_BYTES, MAX_BODY_BYTES = 1024, 2048, 16 << 10
# Heads with one of these differ each time, or ask for what only the ordinary path does.
EXCLUDED = frozenset((b"x-request-id", b"traceparent", b"tracestate", b"expect", b"content-encoding"))
MAX_STUDIES = 64
LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]{1,8})(?=\r\n)", re.IGNORECASE)


@dataclass(slots=True, eq=False)
class KnownHead:
    """Head of an inference request.

    `split`: bytes of JSON before raw tensors, as the header says it; `timeout`: seconds; `tenant`: see
    `queue_tenant_of`; `studies`: how many more bodies are looked at for a template.
    """

    life: RequestLife
    route: Route
    path: Mapping[str, str]
    headers: Mapping[bytes, bytes]
    split: bytes | None
    timeout: float
    tenant: str
    studies: int = MAX_STUDIES


class HeaderCache:
    """Heads of well-formed inference requests; cleared when full."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._known: dict[tuple[bytes, bytes], KnownHead] = {}
        limits = app.life.service.limits
        self._longest = min(MAX_BODY_BYTES, limits.max_body_bytes, limits.max_json_bytes)

    def find(self, head: bytes) -> tuple[KnownHead, int] | None:
        """Return what is known of a head, and the bytes of its body."""
        found = LENGTH.search(head)
        if found is None:
            return None
        known = self._known.get((head[: found.start(1)], head[found.end(1) :]))
        length = int(found[1])
        return None if known is None or length > self._longest else (known, length)

    def learn(self, head: bytes, connection: HttpProtocol, length: int) -> None:
        """Add a head whose requests may be coalesced: right API key, inference route, short body."""
        service, headers = self._app.life.service, dict(connection.headers)
        limits, split, written = service.limits, headers.get(HEADER_LENGTH), LENGTH.search(head)
        if written is None or len(head) > MAX_HEAD_BYTES or length > self._longest:
            return
        if not EXCLUDED.isdisjoint(headers) or (service.keys is not None and not service.keys.admit(headers)):
            return
        found = self._find(connection)
        if found is None:
            return
        try:
            timeout = requested_timeout(headers) or limits.timeout_seconds
        except InputError:
            return
        if len(self._known) >= MAX_HEADS:
            self._known.clear()
        tenant = queue_tenant_of(service, headers)
        key = head[: written.start(1)], head[written.end(1) :]
        self._known[key] = KnownHead(self._app.life, *found, headers, split, timeout, tenant)

    def _find(self, connection: HttpProtocol) -> tuple[Route, Mapping[str, str]] | None:
        """Return the inference route of a head, with its path parameters."""
        scope: Scope = connection.scope  # type: ignore[assignment]
        for address in self._app.routes:
            match, found = address.matches(scope)
            if match is Match.FULL:
                endpoint: Endpoint = found["endpoint"]
                route = endpoint.methods.get(scope["method"])
                if route is None or route.In is not InferRequest:
                    return None
                return route, found["path_params"]
        return None
