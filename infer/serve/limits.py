"""Limits and defaults of the server."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from decimal import Decimal  # never writes an exponent, which `parse` does not take
from typing import Annotated, Any

import msgspec

from ..errors import UsageError, unknown
from ..options import Option, fields

MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
SIZE = re.compile(r"(\d{1,15}|\d{1,9}\.\d{1,9}|true|false)(KiB|MiB|GiB)?")
SHIFT = {"KiB": 10, "MiB": 20, "GiB": 30}
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ServeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one request, connection and queue; times in seconds unless the name says otherwise."""

    max_body_bytes: Annotated[int, Option("bytes of one request body, before and after decompression")] = (
        64 << 20
    )
    max_json_bytes: Annotated[int, Option("bytes of JSON in one body")] = 16 << 20
    max_bodies_bytes: Annotated[int, Option("bytes of all requests that are being read or answered")] = (
        512 << 20
    )
    max_image_pixels: Annotated[int, Option("pixels of one image file, checked before it is decoded")] = (
        64 << 20
    )
    max_image_scans: Annotated[int, Option("scans of one JPEG file, counted before it is decoded")] = 100
    max_audio_seconds: Annotated[float, Option("length of one sound file, checked while it is decoded")] = (
        1800.0
    )
    max_file_bytes: Annotated[int, Option("bytes of one image or sound file")] = 64 << 20
    max_decode_bytes: Annotated[int, Option("memory that decoding one file may take")] = 768 << 20
    decode_seconds: Annotated[float, Option("CPU time that decoding one file may take")] = 10.0
    max_json_depth: Annotated[int, Option("nesting of objects and lists")] = 64
    max_header_bytes: Annotated[
        int, Option("bytes of a request's headers, and of the trailers of a chunked body")
    ] = 32 << 10
    max_headers: Annotated[int, Option("number of headers of a request")] = 100
    max_target_bytes: Annotated[int, Option("bytes of path and query")] = 8 << 10
    max_chunks: Annotated[int, Option("chunks of one body")] = 65536
    max_chunk_extension: Annotated[int, Option("bytes after the size of a chunk")] = 256
    max_connections: Annotated[int, Option("open connections; fewer where fewer files may be open")] = 1024
    spare_connections: Annotated[
        int,
        Option(
            "connections beyond `max_connections` that are answered with 503; further ones are reset",
            minimum=0,
        ),
    ] = 64
    header_seconds: Annotated[
        float,
        Option("time from the first byte of a request to the end of its headers, and for a TLS handshake"),
    ] = 10.0
    body_seconds: Annotated[float, Option("time from the end of the headers to the end of the body")] = 30.0
    send_seconds: Annotated[float, Option("time in which a client must read some of its response")] = 30.0
    min_bytes_per_second: Annotated[
        int, Option("slowest transfer of a body after `grace_seconds`, and of a response", minimum=0)
    ] = 1024
    grace_seconds: Annotated[float, Option("time before the speed of a body is checked")] = 5.0
    keep_alive_seconds: Annotated[int, Option("idle time of a connection between two requests")] = 20
    timeout_seconds: Annotated[float, Option("deadline of a request that names none")] = 60.0
    max_batch: Annotated[int | None, Option("rows of a batch; none: the artifact's own limit")] = None
    max_batch_elements: Annotated[int, Option("elements of the largest input of a batch, with padding")] = (
        1 << 26
    )
    max_delay_us: Annotated[int, Option("microseconds that a batch waits to be filled", minimum=0)] = 0
    max_queue_requests: Annotated[int, Option("requests that wait for one model")] = 1024
    max_queue_rows: Annotated[int, Option("rows of the inputs that wait for one model")] = 16384
    max_queue_bytes: Annotated[int, Option("bytes of the inputs that wait for one model")] = 512 << 20
    max_queue_tokens: Annotated[int, Option("prompt tokens of requests that have no first token yet")] = (
        1 << 20
    )
    max_start_seconds: Annotated[
        float, Option("predicted wait for a first token above which a prompt is refused")
    ] = 60.0
    generation_seconds: Annotated[float, Option("deadline of a text generation request that names none")] = (
        600.0
    )
    max_sequences: Annotated[int, Option("sequences of a stateful model that are open at a time")] = 1024
    max_sequence_bytes: Annotated[int, Option("bytes of the states of all open sequences of one model")] = (
        256 << 20
    )
    sequence_idle_seconds: Annotated[
        float, Option("time without a call after which a sequence is forgotten")
    ] = 60.0
    max_wait_seconds: Annotated[
        float | None,
        Option("predicted queue wait above which a request is refused; none: 1 s, less with many clients"),
    ] = None
    max_stored_responses: Annotated[
        int, Option("responses of /v1/responses that are kept for later requests", minimum=0)
    ] = 4096
    max_stored_bytes: Annotated[
        int,
        Option(
            "bytes of all kept responses with their conversations; 0 keeps none, as with --ray", minimum=0
        ),
    ] = 64 << 20
    nonfinite_error: Annotated[
        bool, Option("refuse outputs that are NaN or infinite; otherwise they are sent as strings", minimum=0)
    ] = False
    wedged_seconds: Annotated[
        float, Option("run time of a batch, in the server's own process, after which the server is not ready")
    ] = 60.0
    watchdog_seconds: Annotated[
        float, Option("run time of a batch, if also ten times its p99, after which its worker is killed")
    ] = 30.0
    drain_seconds: Annotated[float, Option("time to finish accepted requests after SIGTERM", minimum=0)] = (
        30.0
    )

    def __post_init__(self) -> None:
        for field in fields(type(self)):
            value = getattr(self, field.name)
            if value is not None and (value < 0 or (value == 0 and field.option.minimum != 0)):
                least = "0 or more" if field.option.minimum == 0 else "above 0"
                raise UsageError(f"limit {field.name} must be {least}, got {value}")


def parse(limits: ServeLimits | Mapping[str, Any] | Iterable[str]) -> ServeLimits:
    """Make limits from `NAME=VALUE` strings, sizes also as 16MiB, or from values by name. Raises `UsageError`."""
    if isinstance(limits, ServeLimits):
        return limits
    given = dict(limits) if isinstance(limits, Mapping) else dict(map(_parse_limit, limits))
    for name in given:
        if name not in ServeLimits.__struct_fields__:
            raise unknown("limit", name[:64], ServeLimits.__struct_fields__)
    try:
        return msgspec.convert(given, ServeLimits, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"a limit has the wrong type: {error}") from error


def _parse_limit(text: str) -> tuple[str, Any]:
    """Split `max_body_bytes=16MiB` into the name and 16777216."""
    name, equals, value = text.partition("=")
    if name not in ServeLimits.__struct_fields__:
        raise unknown("limit", name[:64], ServeLimits.__struct_fields__)
    match = SIZE.fullmatch(value)
    if not equals or match is None:
        raise UsageError(f"expected a number for {name}, like {name}=100 or, of bytes, 16MiB")
    return name, int(match[1]) << SHIFT[match[2]] if match[2] else value


def format(limits: ServeLimits) -> list[str]:
    """Return `NAME=VALUE` of each limit that is not its default; the inverse of `parse`."""
    pairs = [(name, getattr(limits, name)) for name in limits.__struct_fields__]
    default = ServeLimits()
    return [
        f"{name}={str(value).lower()}" if isinstance(value, bool) else f"{name}={Decimal(str(value)):f}"
        for name, value in pairs
        if value != getattr(default, name)
    ]


def check_model_name(name: str) -> str:
    """Return the name if it is safe in a URL. Raises `UsageError`."""
    if not MODEL_NAME.fullmatch(name):
        raise UsageError(
            f"invalid model name {name[:128]!r}",
            hint="Use letters, digits, '.', '_' and '-', at most 128, starting with a letter or digit",
        )
    return name
