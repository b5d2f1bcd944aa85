"""Route table types: routes, responses and errors, and the conversion of results and errors to responses."""

from __future__ import annotations

import os
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Protocol

import msgspec

from ...errors import DeadlineError, InferError, OverloadedError, ServeError
from ...sanitize import sanitize_text

MAX_MESSAGE = 256  # characters of one exception's message in a log


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


Handler = Callable[[Any], Awaitable[Any]]  # of a `RequestContext`, whose file imports this one
Payload = type[Any] | UnionType | str  # of a response: struct, union of structs, or media type


class Observer(Protocol):
    """Callback at the end of every request, with its `RequestContext`; must not raise or block."""

    def note(self, context: Any, status: int, seconds: float, model: str, version: str) -> None: ...

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
    """Form of an error in one API.

    `api`: metric label of the API; `body`: makes the body, a `schema`, of an error and its status; `overloaded`: status
    of a refusal because too much waits.
    """

    api: str
    body: Callable[[InferError, int], msgspec.Struct]
    schema: type[msgspec.Struct]
    overloaded: int = OverloadedError.status

    def status(self, error: InferError) -> int:
        return self.overloaded if isinstance(error, OverloadedError) else error.status

    def encode(self, error: InferError) -> bytes:
        """Return the body as JSON."""
        return msgspec.json.encode(self.body(error, self.status(error)))


@dataclass(frozen=True)
class Route:
    """Route: method, path, types and handler.

    `In`: struct of the body, None without one; `accepts`: its media types, `image/*` for a file itself; `Out`: struct,
    union of them, or media type; `answers`: other types of the response; `chunk`: struct of one event, if the response
    may be a stream of them; `handler`: coroutine function of a `RequestContext`; `errors`: statuses besides those of
    every route; `work`: runs a model, refused while draining; `binary`: raw tensor bytes may follow the JSON; `open`:
    needs no API key; `precheck`: called with the context, the first bytes of the body, and whether they are all; may
    raise to refuse the request before the rest of the body is read; `query`: struct of the query's parameters.
    """

    method: str
    path: str
    In: type[Any] | None
    Out: Payload
    handler: Handler
    summary: str
    error_format: ErrorFormat
    errors: tuple[int, ...] = ()
    work: bool = False
    binary: bool = False
    open: bool = False
    accepts: tuple[str, ...] = (JSON,)
    answers: tuple[Any, ...] = ()
    chunk: type[Any] | UnionType | None = None
    precheck: Callable[[Any, bytes | bytearray, bool], None] | None = None
    query: type[msgspec.Struct] | None = None


def new_id(prefix: str, size: int = 12) -> str:
    """Return a new id of a response, or of an item of one: `rerank-` and two hexadecimal digits for each byte."""
    return f"{prefix}{os.urandom(size).hex()}"


def error_text(error: InferError) -> str:
    """Return the text of an error for a response."""
    return sanitize_text(str(error))


def exception_summary(error: BaseException) -> str:
    """Return one line for a log: the chain of exceptions, root cause last, each with its innermost frames."""
    parts, seen = [], set[int]()
    chain: BaseException | None = error
    while chain is not None and id(chain) not in seen:
        seen.add(id(chain))
        frames = traceback.extract_tb(chain.__traceback__)[-6:]
        places = " > ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames)
        parts.append(f"{type(chain).__name__}: {sanitize_text(str(chain), MAX_MESSAGE)} [{places}]")
        chain = chain.__cause__ or (None if chain.__suppress_context__ else chain.__context__)
    return " <- ".join(parts)


def to_response(value: object, route: Route) -> Response:
    """Convert a handler's result to a response by the `Out` type of its route."""
    if isinstance(value, Response):
        return value
    if isinstance(route.Out, str):
        return Response(value if isinstance(value, bytes) else str(value).encode(), media=route.Out)
    return Response(msgspec.json.encode(value))


def error_response(error: InferError, error_format: ErrorFormat) -> Response:
    """Return the error response in the format of an API, with the headers of its kind (Retry-After, Allow, …)."""
    response = Response(error_format.encode(error), error_format.status(error))
    if isinstance(error, OverloadedError):
        seconds = min(max(error.retry_after, 0.001), 60.0)
        response.headers += [
            (b"retry-after", b"%d" % -(-seconds // 1)),
            (b"retry-after-ms", b"%d" % (seconds * 1000)),
            (b"x-should-retry", b"true"),
        ]
    elif isinstance(error, DeadlineError):  # else openai's client would retry
        response.headers.append((b"x-should-retry", b"false"))
    elif response.status == 503:
        response.headers += [(b"retry-after", b"1"), (b"retry-after-ms", b"1000")]
        if isinstance(error, ServeError):
            response.headers.append((b"connection", b"close"))
    elif isinstance(error, MethodError):
        response.headers.append((b"allow", ", ".join(error.allow).encode()))
    elif isinstance(error, UnauthorizedError):
        response.headers.append((b"www-authenticate", b"Bearer"))
    elif response.status == 413 or isinstance(error, SlowBodyError):
        response.headers.append((b"connection", b"close"))
    return response
