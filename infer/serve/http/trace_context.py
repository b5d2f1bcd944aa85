"""W3C Trace Context of requests (https://www.w3.org/TR/trace-context/).

`traceparent` and `tracestate` are parsed strictly: malformed headers are ignored; `traceresponse` returns the server's
span.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
STATE = re.compile(rb"[ -~\t]{1,512}")
NO_TRACE, NO_SPAN = b"0" * 32, b"0" * 16
SAMPLED = 1


@dataclass(slots=True)
class TraceContext:
    """Trace of one request.

    `parent`: the caller's span, "" at the root; `span`: this server's; `state`: the vendors' header.
    """

    id: str
    parent: str
    span: str
    sampled: bool
    state: str = ""

    def header(self) -> bytes:
        return f"00-{self.id}-{self.span}-{int(self.sampled):02x}".encode()


def start_trace(headers: Iterable[tuple[bytes, bytes]], *, always: bool = False) -> TraceContext | None:
    """Return the caller's trace, else with `always` a new one, else None."""
    found = parse_trace(headers)
    if found is None and always:
        return TraceContext(os.urandom(16).hex(), "", os.urandom(8).hex(), True)
    return found


def parse_trace(headers: Iterable[tuple[bytes, bytes]]) -> TraceContext | None:
    """Return the caller's trace with a new server span; None for absent, multiple or malformed headers."""
    parents, states = list[bytes](), list[bytes]()
    for name, value in headers:
        if name == b"traceparent":
            parents.append(value)
        elif name == b"tracestate":
            states.append(value)
    found = PARENT.fullmatch(parents[0].strip(b" \t")) if len(parents) == 1 else None
    if found is None:
        return None
    version, trace, parent, flags, more = found.groups()
    if version == b"ff" or (version == b"00" and more) or trace == NO_TRACE or parent == NO_SPAN:
        return None
    state = b",".join(states)
    return TraceContext(
        trace.decode(),
        parent.decode(),
        os.urandom(8).hex(),
        bool(int(flags, 16) & SAMPLED),
        state.decode() if STATE.fullmatch(state) else "",
    )
