"""What handlers give and raise, as what goes back."""

from __future__ import annotations

from typing import Any

import msgspec

from ...errors import DeadlineError, InferError, OverloadedError, ServeError
from .routing import Dialect, MethodError, Reply, Route, SlowBodyError, UnauthorizedError


def reply_of(value: Any, route: Route) -> Reply:
    """What a handler gave, as its route says it."""
    if isinstance(value, Reply):
        return value
    if isinstance(route.Out, str):
        return Reply(value if isinstance(value, bytes) else str(value).encode(), media=route.Out)
    return Reply(msgspec.json.encode(value))


def error_reply(error: InferError, dialect: Dialect) -> Reply:
    """The error in the dialect's words, with the headers that its kind asks for."""
    reply = Reply(msgspec.json.encode(dialect.body(error)), dialect.status(error))
    if isinstance(error, OverloadedError):
        seconds = min(max(error.retry_after, 0.001), 60.0)
        reply.headers += [
            (b"retry-after", b"%d" % -(-seconds // 1)),
            (b"retry-after-ms", b"%d" % (seconds * 1000)),
            (b"x-should-retry", b"true"),
        ]
    elif isinstance(error, DeadlineError):  # openai's client would ask again, for nothing
        reply.headers.append((b"x-should-retry", b"false"))
    elif reply.status == 503:
        reply.headers += [(b"retry-after", b"1"), (b"retry-after-ms", b"1000")]
        if isinstance(error, ServeError):
            reply.headers.append((b"connection", b"close"))
    elif isinstance(error, MethodError):
        reply.headers.append((b"allow", ", ".join(error.allow).encode()))
    elif isinstance(error, UnauthorizedError):
        reply.headers.append((b"www-authenticate", b"Bearer"))
    elif reply.status == 413 or isinstance(error, SlowBodyError):
        reply.headers.append((b"connection", b"close"))
    return reply
