"""Request logs on stderr, and traces for OpenTelemetry."""

from __future__ import annotations

import sys

from ..service import Service
from . import spans
from .request_log import Lines, RequestLog


def attach(service: Service, *, requests: bool = False, bodies: bool = False, traces: bool = False) -> None:
    """Log requests as lines of JSON on stderr, `bodies` with them, and export `traces` as spans over OTLP.

    Raises `NotUsableError` where a package for it is missing.
    """
    if requests or bodies:
        lines = Lines(sys.stderr.fileno())
        service.metrics.dropped_lines(lambda: lines.dropped)
        service.observers.append(RequestLog(lines, bodies=bodies))
    if traces:
        service.observers.append(spans.exported())
        service.traces = True
