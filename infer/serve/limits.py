"""Every cap and default of the server, in one place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ..errors import UsageError, unknown

MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
MAY_BE_ZERO = (
    "max_delay_us",
    "drain_seconds",
    "spare_connections",
    "min_bytes_per_second",
    "nonfinite_error",
)
SIZE = re.compile(r"(\d{1,15}|\d{1,9}\.\d{1,9}|true|false)(KiB|MiB|GiB)?")
SHIFT = {"KiB": 10, "MiB": 20, "GiB": 30}
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ServeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one request, connection and queue; times in seconds unless the name says otherwise."""

    max_body_bytes: int = 64 << 20  # of one request, before and after inflating
    max_json_bytes: int = 16 << 20  # of a body, or the part of it, that is JSON
    max_bodies_bytes: int = 512 << 20  # of all requests that are being read or answered
    max_json_depth: int = 64  # of objects and lists in each other
    max_header_bytes: int = 32 << 10  # of a request's head, and of the trailers of a chunked body
    max_headers: int = 100  # lines of them
    max_target_bytes: int = 8 << 10  # path and query
    max_chunks: int = 65536  # of one body
    max_chunk_extension: int = 256  # bytes after the size of a chunk
    max_connections: int = 1024  # open at once; fewer where fewer files may be open
    spare_connections: int = 64  # beyond them, told 503; further ones are reset
    header_seconds: float = 10.0  # from the first byte of a request to the end of its head; of a handshake
    body_seconds: float = 30.0  # from there to the end of its body
    send_seconds: float = 30.0  # in each of which a client must read some of what waits for it
    min_bytes_per_second: int = 1024  # of a body after its first `grace_seconds`, and of an answer
    grace_seconds: float = 5.0  # before the speed of a body is looked at
    keep_alive_seconds: int = 20  # that a connection may rest between two requests
    timeout_seconds: float = 60.0  # of a request that names none
    max_batch: int | None = None  # rows; None: what the artifact was made for
    max_batch_elements: int = 1 << 26  # of the largest input, padding included
    max_delay_us: int = 0  # how long an unfilled batch may wait for company
    max_queue_requests: int = 1024  # of one model, waiting
    max_queue_rows: int = 16384  # of their inputs
    max_queue_bytes: int = 512 << 20  # of their inputs
    max_queue_tokens: int = 1 << 20  # of prompts without a first token
    max_start_seconds: float = 60.0  # predicted wait for a first token beyond which prompts are turned away
    generation_seconds: float = 600.0  # of a request for text that names no time
    max_wait_seconds: float | None = None  # predicted wait that turns away; None: 1 s, less for a crowd
    nonfinite_error: bool = False  # refuse outputs that are NaN or infinite; else they go as strings
    wedged_seconds: float = 60.0  # a batch in the server's own process that runs longer makes it not ready
    watchdog_seconds: float = 30.0  # a worker whose batch takes longer, and ten times its p99, is killed
    drain_seconds: float = 30.0  # to finish accepted requests after SIGTERM

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and (value < 0 or (value == 0 and name not in MAY_BE_ZERO)):
                raise UsageError(f"limit {name} must be above 0, got {value}")


def parse(limits: ServeLimits | Mapping[str, Any] | Iterable[str]) -> ServeLimits:
    """Make limits from `NAME=VALUE` texts, sizes also as 16MiB, or from values by name; raises `UsageError`."""
    if isinstance(limits, ServeLimits):
        return limits
    given = dict(limits) if isinstance(limits, Mapping) else dict(map(_pair, limits))
    for name in given:
        if name not in ServeLimits.__struct_fields__:
            raise unknown("limit", name[:64], ServeLimits.__struct_fields__)
    try:
        return msgspec.convert(given, ServeLimits, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"a limit has the wrong type: {error}") from error


def _pair(text: str) -> tuple[str, Any]:
    """`max_body_bytes=16MiB` → the name and 16777216."""
    name, equals, value = text.partition("=")
    if name not in ServeLimits.__struct_fields__:
        raise unknown("limit", name[:64], ServeLimits.__struct_fields__)
    found = SIZE.fullmatch(value)
    if not equals or found is None:
        raise UsageError(f"expected a number for {name}, like {name}=100 or, of bytes, 16MiB")
    return name, int(found[1]) << SHIFT[found[2]] if found[2] else value


def format(limits: ServeLimits) -> list[str]:
    """The inverse of `parse`: `NAME=VALUE` of each limit that is not its default."""
    pairs = [(name, getattr(limits, name)) for name in limits.__struct_fields__]
    default = ServeLimits()
    return [
        f"{name}={str(value).lower()}" if isinstance(value, bool) else f"{name}={value}"
        for name, value in pairs
        if value != getattr(default, name)
    ]


def check_model_name(name: str) -> str:
    """The name, if it can stand in a URL as it is; raises `UsageError`."""
    if not MODEL_NAME.fullmatch(name):
        raise UsageError(
            f"a model can't be served under the name {name[:128]!r}",
            hint="Use letters, digits, '.', '_' and '-', at most 128, starting with a letter or digit",
        )
    return name
