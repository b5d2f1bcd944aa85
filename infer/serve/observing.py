"""What is told about requests, and where: a log on stderr, traces for OpenTelemetry."""

from __future__ import annotations

import sys

import msgspec

from . import spans
from .request_log import Lines, RequestLog
from .service import Service


class Observing(msgspec.Struct, frozen=True, kw_only=True):
    """`requests`: one line of JSON each on stderr, with `bodies` also what was asked; `traces`: spans over OTLP."""

    requests: bool = False
    bodies: bool = False
    traces: bool = False


def attach(service: Service, wanted: Observing) -> None:
    """Raises `NotUsableError` where a package for it is missing."""
    if wanted.requests or wanted.bodies:
        lines = Lines(sys.stderr.fileno())
        service.metrics.dropped_lines(lambda: lines.dropped)
        service.observers.append(RequestLog(lines, bodies=wanted.bodies))
    if wanted.traces:
        service.observers.append(spans.exported())
        service.traces = True
