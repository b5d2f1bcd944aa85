"""Responses made from the results and errors of handlers."""

from __future__ import annotations

from typing import Any

import msgspec

from ...errors import DeadlineError, InferError, OverloadedError, ServeError
from .routing import ErrorFormat, MethodError, Response, Route, SlowBodyError, UnauthorizedError


def to_response(value: Any, route: Route) -> Response:
    """Convert a handler's result to a response by the `Out` type of its route."""
    if isinstance(value, Response):
        return value
    if isinstance(route.Out, str):
        return Response(value if isinstance(value, bytes) else str(value).encode(), media=route.Out)
    return Response(msgspec.json.encode(value))


def error_response(error: InferError, error_format: ErrorFormat) -> Response:
    """Return the error response in the format of an API, with the headers of its kind (Retry-After, Allow, …)."""
    response = Response(msgspec.json.encode(error_format.body(error)), error_format.status(error))
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
