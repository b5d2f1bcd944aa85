"""The words of the route table; dispatch, validation and OpenAPI all read it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from ...errors import InferError, InputError, ServeError, TooLargeError
from . import json_parse

if TYPE_CHECKING:
    from ..observability.tracing import Trace
    from ..service import Service

T = TypeVar("T")
JSON = "application/json"
BINARY = "application/octet-stream"
EVENTS = "text/event-stream"
CLIENT_GONE = 499  # never sent: what logs and counters say of a client that hung up


class MethodError(ServeError):
    """405; `allow` is what the route does take."""

    status, code = 405, "method_not_allowed"

    def __init__(self, allow: list[str]) -> None:
        super().__init__("this address does not take that method", hint=f"Use {', '.join(allow)}")
        self.allow = allow


class SlowBodyError(ServeError):
    status, code = 408, "request_timeout"


class TooManyConnectionsError(ServeError):
    """On a connection beyond the limit of them."""

    status, code = 503, "too_many_connections"


class NonfiniteError(ServeError):
    """An output is NaN or infinite, and the server was told to refuse that."""

    code = "nonfinite_output"

    def __init__(self, name: str, count: int) -> None:
        super().__init__(f"{count} values of output {name} are not finite")


class UnauthorizedError(ServeError):
    status, code = 401, "unauthorized"


class Observer(Protocol):
    """Is told of every request when it is over; must not fail or wait."""

    def note(self, call: RequestContext, status: int, seconds: float, model: str, version: str) -> None: ...

    def close(self) -> None: ...


class BodyStream(Protocol):
    """A body that comes bit by bit; `close` frees what makes it, read to the end or not."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Response:
    """What goes back. `body` is sent as it is; with `stream` they are the body."""

    body: bytes = b""
    status: int = 200
    media: str = JSON
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    stream: BodyStream | None = None

    def head(self, call: RequestContext, *, over: bool) -> list[tuple[bytes, bytes]]:
        """All its headers but the length; `over`: the connection is one too many."""
        headers = [
            (b"content-type", self.media.encode()),
            (b"x-request-id", call.request_id.encode()),
            *self.headers,
        ]
        if call.trace is not None:
            headers.append((b"traceresponse", call.trace.header()))
        if (over or call.service.state == "draining") and (b"connection", b"close") not in headers:
            headers.append((b"connection", b"close"))
        return headers


def header_lines(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Raises `ValueError` for one that would be two."""
    lines = b"".join([b"%b: %b\r\n" % header for header in headers])
    if lines.count(b"\n") != len(headers):
        raise ValueError("a line break in a header of an answer")
    return lines


@dataclass(frozen=True)
class Dialect:
    """How one family of routes says that something went wrong."""

    name: str
    status: Callable[[InferError], int]
    body: Callable[[InferError], Any]
    error: type[msgspec.Struct]


@dataclass(slots=True)
class RequestContext:
    """One request on its way: what came, for whom, and how long it may take.

    `adapter`: of the model, where the request named one. `known`: the address takes this method. `error`: what it ended
    with, if it did. `measure`: once it is answered, what it took, by names that end in their unit.
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
    known: bool = True
    trace: Trace | None = None
    error: InferError | None = None
    measure: Callable[[], dict[str, Any]] | None = None

    def json(self, to: type[T], part: bytes | memoryview | None = None) -> T:
        """The body, or a part of it, as a `to`; raises `TooLargeError` and `InputError`."""
        return json_parse.convert(self.value(part), to)

    def value(self, part: bytes | memoryview | None = None) -> Any:
        """The same as plain values, for `strict.convert`; raises `TooLargeError` and `InputError`."""
        text, limits = self.body if part is None else part, self.service.limits
        if len(text) > limits.max_json_bytes:
            raise TooLargeError(
                f"the JSON is longer than {limits.max_json_bytes} bytes", hint="Send tensors as binary data"
            )
        return json_parse.parse(text, max_depth=limits.max_json_depth)

    def require_key(self) -> None:
        """Raises `UnauthorizedError` where the server has an API key and the request has not."""
        keys = self.service.keys
        if keys is not None and not keys.admit(self.headers):
            raise UnauthorizedError("a valid API key is needed", hint="Send Authorization: Bearer KEY")

    def timeout(self, default: float | None = None) -> float:
        """Seconds this request may take: header X-Request-Timeout-Ms, else `default`, else the server's."""
        return requested_timeout(self.headers) or default or self.service.limits.timeout_seconds


def requested_timeout(headers: Mapping[bytes, bytes]) -> float | None:
    """Seconds, as X-Request-Timeout-Ms says them; raises `InputError`."""
    text = headers.get(b"x-request-timeout-ms")
    if text is None:
        return None
    if not text.isdigit() or not 0 < len(text) < 10 or int(text) == 0:
        raise InputError("expected a number of milliseconds above 0", where="header X-Request-Timeout-Ms")
    return int(text) / 1000


@dataclass(frozen=True)
class Route:
    """One row of the table. `In`: struct of the body, None without one; `Out`: struct, or a media type;
    `chunk`: struct of one event, where the answer may be a stream of them.

    `errors`: statuses that the handler adds to those every route can give. `work`: it runs a model, and is
    refused while draining. `binary`: raw tensor bytes may follow the JSON. `open`: needs no API key. `early`: gets the
    bytes of the body that came first, and whether they are all; raises what spares the server the rest.
    """

    method: str
    path: str
    In: type[Any] | None
    Out: type[Any] | str
    handler: Callable[[RequestContext], Awaitable[Any]]
    summary: str
    dialect: Dialect
    errors: tuple[int, ...] = ()
    work: bool = False
    binary: bool = False
    open: bool = False
    chunk: type[Any] | None = None
    early: Callable[[RequestContext, bytes | bytearray, bool], None] | None = None
