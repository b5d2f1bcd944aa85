"""Every cap and default of the server, in one place."""

from __future__ import annotations

import re

import msgspec

from ..errors import UsageError

MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ServeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one request, connection and queue may take. Times in seconds unless the name says otherwise."""

    max_body_bytes: int = 64 << 20
    max_json_depth: int = 64
    max_header_bytes: int = 32 << 10
    max_headers: int = 100
    max_target_bytes: int = 8 << 10
    max_connections: int = 1024
    header_seconds: float = 10.0
    body_seconds: float = 30.0
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
    wedged_seconds: float = 60.0  # a batch that runs longer makes the server not ready
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and (
                value < 0 or (value == 0 and name not in ("max_delay_us", "drain_seconds"))
            ):
                raise UsageError(f"limit {name} must be above 0, got {value}")


def check_model_name(name: str) -> str:
    """The name, if it can stand in a URL as it is; raises `UsageError`."""
    if not MODEL_NAME.fullmatch(name):
        raise UsageError(
            f"a model can't be served under the name {name[:128]!r}",
            hint="Use letters, digits, '.', '_' and '-', at most 128, starting with a letter or digit",
        )
    return name
