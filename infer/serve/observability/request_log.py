"""Request log: one JSON line per request, written by a thread, so that a slow sink blocks no response."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from typing import Any

import msgspec

from ...sanitize import sanitize_text
from ..http.request_context import RequestContext
from ..http.routing import CLIENT_GONE
from ..service import Service
from . import tracing

MOST_LINES = 10_000  # that wait to be written; more are dropped and counted
MOST_BODY = 4096  # bytes of a request's body that are shown
MOST_CLIENT = 256  # characters of what a client says about itself
GATHER = 0.02  # seconds from the first line to the write that takes all that came since
encode = msgspec.json.Encoder().encode


def attach(service: Service, *, requests: bool = False, bodies: bool = False, traces: bool = False) -> None:
    """Log requests as JSON lines on stderr, with `bodies`, and export `traces` over OTLP.

    Raises `NotUsableError` where a package for it is missing.
    """
    if requests or bodies:
        lines = LineWriter(sys.stderr.fileno())
        service.metrics.add_dropped_lines(lambda: lines.dropped)
        service.observers.append(RequestLog(lines, bodies=bodies))
    if traces:
        service.observers.append(tracing.otlp_spans())
        service.traces = True


class RequestLog:
    """Observer that logs requests.

    `bodies`: log request bodies too, cut at 4 KiB: for debugging only, since they hold users' data.
    """

    def __init__(self, lines: LineWriter, *, bodies: bool = False) -> None:
        self.lines, self.bodies = lines, bodies

    def close(self) -> None:
        """Flush queued log lines and stop the writer."""
        self.lines.close()

    def note(self, context: RequestContext, status: int, seconds: float, model: str, version: str) -> None:
        """Log one request; successful health checks, scrapes and page views are left out."""
        if status < 400 and not context.route.work:
            return
        line: dict[str, Any] = {
            "time": rfc3339(time.time()),
            "level": _level(status),
            "event": "request",
            "id": context.request_id,
            "method": context.method,
            "route": context.route.path if context.known else "",
            "status": status,
            "ms": round(1000 * seconds, 3),
            "api": context.route.error_format.api,
            "client": context.client,
            "agent": sanitize_text(context.headers.get(b"user-agent", b"").decode("latin-1"), MOST_CLIENT),
            "bytes_in": len(context.body),
        }
        if model:
            line["model"], line["version"] = model, version
        if context.measure is not None:
            line |= context.measure()
        if context.trace is not None:
            line["trace_id"], line["span_id"] = context.trace.id, context.trace.span
            line["parent_id"] = context.trace.parent
        if context.error is not None:
            line["error"], line["message"] = (
                context.error.code,
                sanitize_text(str(context.error), MOST_CLIENT),
            )
        if self.bodies:
            line["body"] = sanitize_text(bytes(context.body[:MOST_BODY]).decode(errors="replace"), MOST_BODY)
        self.lines.put(encode(line) + b"\n")


def _level(status: int) -> str:
    """Return the log level: refusals and client errors are warnings, a disconnected client is neither."""
    if status < 400 or status == CLIENT_GONE:
        return "info"
    return "warning" if status < 500 or status == 503 else "error"


def rfc3339(when: float) -> str:
    """Format a Unix time as RFC 3339 in UTC with milliseconds."""
    whole, rest = divmod(when, 1)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{int(1000 * rest):03d}Z"


class LineWriter:
    """Queue of lines for a file descriptor.

    `dropped` counts lines beyond `most` waiting ones, and those that could not be written.
    """

    def __init__(self, descriptor: int, *, most: int = MOST_LINES) -> None:
        self.descriptor, self.most, self.dropped = descriptor, most, 0
        self._queue = queue.SimpleQueue[bytes | None]()
        self._thread = threading.Thread(target=self._run, name="infer-log", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        if self._queue.qsize() >= self.most:
            self.dropped += 1
        else:
            self._queue.put(line)

    def close(self, seconds: float = 1.0) -> None:
        """Write waiting lines, for at most so many seconds."""
        self._queue.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        open_ = True
        while open_:
            lines = [self._queue.get()]
            if lines[0] is not None:
                time.sleep(GATHER)
            while not self._queue.empty():
                lines.append(self._queue.get())
            open_ = None not in lines
            self._write([line for line in lines if line is not None])

    def _write(self, lines: list[bytes]) -> None:
        data = memoryview(b"".join(lines))
        try:
            while data:
                data = data[os.write(self.descriptor, data) :]
        except OSError:  # its reader is gone or its disk is full; the counter tells
            self.dropped += len(lines)
