"""Every cap and default of the server, in one place."""

from __future__ import annotations

import re

import msgspec

from ..errors import UsageError

MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
MAY_BE_ZERO = (
    "max_delay_us",
    "drain_seconds",
    "spare_connections",
    "min_bytes_per_second",
    "nonfinite_error",
)
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ServeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one request, connection and queue may take. Times in seconds unless the name says otherwise."""

    max_body_bytes: int = 64 << 20
    max_json_bytes: int = 16 << 20  # of a body, or the part of it, that is JSON
    max_bodies_bytes: int = 512 << 20  # of all requests that are being read or answered
    max_json_depth: int = 64
    max_header_bytes: int = 32 << 10
    max_headers: int = 100
    max_target_bytes: int = 8 << 10
    max_chunks: int = 65536  # of one body
    max_chunk_extension: int = 256  # bytes
    max_connections: int = 1024
    spare_connections: int = 64  # beyond them, told 503; further ones are reset
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    send_seconds: float = 30.0  # in each of which a client must read some of what waits for it
    min_bytes_per_second: int = 1024  # of a body after its first `grace_seconds`, and of an answer
    grace_seconds: float = 5.0
    keep_alive_seconds: int = 20
    timeout_seconds: float = 60.0  # of a request that names none
    max_batch: int | None = None  # rows; None: what the artifact was made for
    max_batch_elements: int = 1 << 26  # of the largest input, padding included
    max_delay_us: int = 0  # how long an unfilled batch may wait for company
    max_queue_requests: int = 1024
    max_queue_rows: int = 16384
    max_queue_bytes: int = 512 << 20
    max_queue_tokens: int = 1 << 20  # of prompts without a first token
    max_start_seconds: float = 60.0  # predicted wait for a first token beyond which prompts are turned away
    generation_seconds: float = 600.0  # of a request for text that names no time
    max_wait_seconds: float = 5.0  # predicted wait beyond which new work is turned away
    nonfinite_error: bool = False  # refuse outputs that are NaN or infinite; else they go as strings
    wedged_seconds: float = 60.0  # a batch in the server's own process that runs longer makes it not ready
    watchdog_seconds: float = 30.0  # a worker whose batch takes longer, and ten times its p99, is killed
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and (value < 0 or (value == 0 and name not in MAY_BE_ZERO)):
                raise UsageError(f"limit {name} must be above 0, got {value}")


def check_model_name(name: str) -> str:
    """The name, if it can stand in a URL as it is; raises `UsageError`."""
    if not MODEL_NAME.fullmatch(name):
        raise UsageError(
            f"a model can't be served under the name {name[:128]!r}",
            hint="Use letters, digits, '.', '_' and '-', at most 128, starting with a letter or digit",
        )
    return name
