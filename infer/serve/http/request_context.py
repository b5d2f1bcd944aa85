"""Context of one HTTP request, and its tenant.

A tenant is the API key that a request came with, or the client's address where the server has no keys. Tenants share
the engine fairly; they share prefix-cache pages only where the operator allows it.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from ...errors import DeadlineError, InferError, InputError, TooLargeError
from ..service import Service
from . import json_parse
from .connection import ConnectionHandle
from .routing import Response, Route, UnauthorizedError
from .trace_context import TraceContext

T = TypeVar("T")
IPV6_BITS = 64  # of an address that its owner does not choose


@dataclass(slots=True)
class RequestContext:
    """HTTP request with its service and route, as handlers, logs and traces see it.

    `path`: parameters of the path; `query`: the text behind its "?"; `adapter`: LoRA adapter that the request named;
    `connection`: its connection, None of another ASGI server's; `over_limit`: that is one above the limit;
    `known`: the path supports the method; `began`: monotonic time from which its deadline counts, the end of its body;
    `seconds`: those that its body allows it, if it says so; `error`: set if the request failed; `measure`: set when it
    is answered, returns its times by name.
    """

    service: Service
    route: Route
    path: Mapping[str, str]
    headers: Mapping[bytes, bytes]
    request_id: str
    body: bytes | bytearray = b""
    model: str = ""
    adapter: str | None = None
    method: str = ""
    client: str = ""
    query: str = ""
    known: bool = True
    connection: ConnectionHandle | None = None
    over_limit: bool = False
    began: float = field(default_factory=time.monotonic)
    seconds: float | None = None
    trace: TraceContext | None = None
    error: InferError | None = None
    measure: Callable[[], dict[str, Any]] | None = None

    def json(self, to: type[T], part: bytes | memoryview | None = None) -> T:
        """Decode the JSON body, or a part of it, to type `to`. Raises `TooLargeError` and `InputError`."""
        return json_parse.convert(self.value(part), to)

    def value(self, part: bytes | memoryview | None = None) -> Any:
        """Decode the JSON body, or a part of it, to plain values. Raises `TooLargeError` and `InputError`."""
        text, limits = self.body if part is None else part, self.service.limits
        if len(text) > limits.max_json_bytes:
            raise TooLargeError(
                f"expected at most {limits.max_json_bytes} bytes of JSON, got {len(text)}",
                hint="Send tensors as binary data",
            )
        return json_parse.parse(text, max_depth=limits.max_json_depth)

    def parameters(self, to: type[T]) -> T:
        """Convert the query to type `to`. Raises `InputError` for a value of another type, and an unknown name."""
        return json_parse.convert(dict(parse_qsl(self.query, keep_blank_values=True)), to, strict=False)

    def require_key(self) -> None:
        """Raise `UnauthorizedError` if the server has API keys and the request brings none of them."""
        keys = self.service.keys
        if keys is not None and not keys.admit(self.headers):
            raise UnauthorizedError(
                "expected a valid API key", hint="Send Authorization: Bearer KEY, or X-Api-Key: KEY"
            )

    def timeout(self, default: float | None = None) -> float:
        """Return the seconds left of those this request may take; raise `DeadlineError` for none.

        They are those of its body, else of header X-Request-Timeout-Ms, else `default`, else the server's.
        """
        asked = self.seconds or requested_timeout(self.headers)
        allowed = asked or default or self.service.limits.timeout_seconds
        left = allowed - (time.monotonic() - self.began)
        if left <= 0:
            raise DeadlineError(f"the request took longer than its {allowed:g} s")
        return left

    def generation_timeout(self) -> float:
        """Return the seconds left of a request for generated text, as `timeout` does."""
        return self.timeout(self.service.limits.generation_seconds)

    @property
    def tenant(self) -> str:
        """Name of the request's API key, or its address (IPv6: the /64 network)."""
        if self.service.keys is not None:
            return self.service.keys.tenant(self.headers)
        try:
            address = ipaddress.ip_address(self.client)
        except ValueError:
            return self.client
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
            return str(ipaddress.IPv6Network((int(address) >> IPV6_BITS << IPV6_BITS, IPV6_BITS)))
        return str(getattr(address, "ipv4_mapped", None) or address)

    @property
    def queue_tenant(self) -> str:
        """Tenant whose share of a tensor queue the request takes; see `queue_tenant_of`."""
        return queue_tenant_of(self.service, self.headers)

    def response_headers(self, response: Response) -> list[tuple[bytes, bytes]]:
        """Return all headers of a response but its length."""
        headers = [
            (b"content-type", response.media.encode()),
            (b"x-request-id", self.request_id.encode()),
            *response.headers,
        ]
        if self.trace is not None:
            headers.append((b"traceresponse", self.trace.header()))
        closes = self.over_limit or self.service.state == "draining"
        if closes and (b"connection", b"close") not in headers:
            headers.append((b"connection", b"close"))
        return headers


def requested_timeout(headers: Mapping[bytes, bytes]) -> float | None:
    """Return the seconds of header X-Request-Timeout-Ms, None without it. Raises `InputError`."""
    text = headers.get(b"x-request-timeout-ms")
    if text is None:
        return None
    if not text.isdigit() or not 0 < len(text) < 10 or int(text) == 0:
        raise InputError("expected a number of milliseconds above 0", where="header X-Request-Timeout-Ms")
    return int(text) / 1000


def queue_tenant_of(service: Service, headers: Mapping[bytes, bytes]) -> str:
    """Return the tenant whose share of a tensor queue a request takes; "" with fewer than two keys."""
    keys = service.keys
    return keys.tenant(headers) if keys is not None and len(keys) > 1 else ""
