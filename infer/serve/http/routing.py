"""Route table types: routes, responses, error formats and errors, used by dispatch, validation and OpenAPI."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from ...errors import InferError, ServeError

JSON = "application/json"
BINARY = "application/octet-stream"
EVENTS = "text/event-stream"
CLIENT_GONE = 499  # never sent: status in logs and metrics of a client that disconnected


class MethodError(ServeError):
    """Method that a path does not support; `allow`: those that it does."""

    status, code = 405, "method_not_allowed"

    def __init__(self, allow: list[str]) -> None:
        super().__init__("this path does not support that method", hint=f"Use {', '.join(allow)}")
        self.allow = allow


class SlowBodyError(ServeError):
    """Request body that arrives too late or too slowly."""

    status, code = 408, "request_timeout"


class TooManyConnectionsError(ServeError):
    """Connection beyond the limit of open connections."""

    status, code = 503, "too_many_connections"


class NonfiniteError(ServeError):
    """Output with NaN or infinity, while limit `nonfinite_error` is set."""

    code = "nonfinite_output"

    def __init__(self, name: str, count: int) -> None:
        super().__init__(f"{count} values of output {name} are not finite")


class UnauthorizedError(ServeError):
    """Missing or wrong API key."""

    status, code = 401, "unauthorized"


class Observer(Protocol):
    """Callback at the end of every request, with its `RequestContext`; must not raise or block."""

    def note(self, call: Any, status: int, seconds: float, model: str, version: str) -> None: ...

    def close(self) -> None: ...


class BodyStream(Protocol):
    """Response body that is generated in parts; `close` frees its source, read to the end or not."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Response:
    """Response of a handler: `body`, or the parts of `stream`."""

    body: bytes = b""
    status: int = 200
    media: str = JSON
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    stream: BodyStream | None = None


def header_lines(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return header lines. Raises `ValueError` for a line break in one."""
    lines = b"".join([b"%b: %b\r\n" % header for header in headers])
    if lines.count(b"\n") != len(headers):
        raise ValueError("a response header contains a line break")
    return lines


@dataclass(frozen=True)
class ErrorFormat:
    """Status and body of an error in one API. `api`: metric label of the API; `schema`: struct of the body."""

    api: str
    status: Callable[[InferError], int]
    body: Callable[[InferError], Any]
    schema: type[msgspec.Struct]


@dataclass(frozen=True)
class Route:
    """Route: method, path, types and handler.

    `In`: struct of the body, None without one; `Out`: struct or media type; `chunk`: struct of one event, if the
    response may be a stream of them; `handler`: coroutine function of a `RequestContext`; `errors`: statuses besides
    those of every route; `work`: runs a model, refused while draining; `binary`: raw tensor bytes may follow the JSON;
    `open`: needs no API key; `precheck`: called with the context, the first bytes of the body, and whether they are
    all; may raise to refuse the request before the rest of the body is read.
    """

    method: str
    path: str
    In: type[Any] | None
    Out: type[Any] | str
    handler: Callable[[Any], Awaitable[Any]]
    summary: str
    error_format: ErrorFormat
    errors: tuple[int, ...] = ()
    work: bool = False
    binary: bool = False
    open: bool = False
    chunk: type[Any] | None = None
    precheck: Callable[[Any, bytes | bytearray, bool], None] | None = None
