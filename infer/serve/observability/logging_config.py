"""Request logs on stderr and OpenTelemetry traces, attached to a service."""

from __future__ import annotations

import sys

from ..service import Service
from . import spans
from .request_log import LineWriter, RequestLog


def attach(service: Service, *, requests: bool = False, bodies: bool = False, traces: bool = False) -> None:
    """Log requests as JSON lines on stderr, with `bodies`, and export `traces` over OTLP.

    Raises `NotUsableError` where a package for it is missing.
    """
    if requests or bodies:
        lines = LineWriter(sys.stderr.fileno())
        service.metrics.add_dropped_lines(lambda: lines.dropped)
        service.observers.append(RequestLog(lines, bodies=bodies))
    if traces:
        service.observers.append(spans.otlp_spans())
        service.traces = True
