"""Spans for OpenTelemetry (extra `otel`): one per request, and inside it the queue, the model and the stream.

Workers measure by a clock that all processes of a machine share, and send that with what they made: their spans are
told from here, with their process id, so that one sampler decides and nothing is lost with a worker that dies.

Where they go is told in OpenTelemetry's own variables, such as OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_TRACES_SAMPLER.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import NotUsableError
from ..http.request_context import RequestContext
from .tracing import Trace

PER_MILLISECOND, PER_SECOND = 1_000_000, 1_000_000_000  # OpenTelemetry counts nanoseconds since 1970


@dataclass(frozen=True, slots=True)
class Part:
    """Of a request: milliseconds, those from the end of the part before it (of its parent's begin) until its own, and
    whether it was in the worker's process."""

    name: str
    takes: float
    after: float = 0.0
    there: bool = False
    inside: tuple[Part, ...] = ()


class Spans:
    """`processor`: an SDK's span processor, such as one that exports; it is shut down by `close`."""

    def __init__(self, processor: Any) -> None:
        from opentelemetry import context, trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import RandomIdGenerator, TracerProvider

        class Ids(RandomIdGenerator):
            """Those that the answer told its caller, then random ones."""

            def __init__(self) -> None:
                self.span, self.trace = 0, 0

            def generate_span_id(self) -> int:
                wanted, self.span = self.span, 0
                return wanted or super().generate_span_id()

            def generate_trace_id(self) -> int:
                return self.trace or super().generate_trace_id()

        self._api, self._nowhere, self._ids = trace, context.Context(), Ids()
        named = Resource.create({"service.name": "infer"})  # OTEL_SERVICE_NAME outranks it
        self._provider = TracerProvider(resource=named, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("infer.serve")

    def note(self, call: RequestContext, status: int, seconds: float, model: str, version: str) -> None:
        """A request that ended now, after so many seconds; what was measured of it lies at its end."""
        if not call.route.work or call.trace is None:
            return
        api, end = self._api, time.time_ns()
        measured = call.measure() if call.measure is not None else {}
        self._ids.span, self._ids.trace = int(call.trace.span, 16), int(call.trace.id, 16)
        span = self._tracer.start_span(
            f"{call.method} {call.route.path}",
            context=self._parent(call.trace),
            kind=api.SpanKind.SERVER,
            start_time=end - int(seconds * PER_SECOND),
            attributes=_attributes(call, status, model, version, measured),
        )
        if status >= 500:
            span.set_status(api.StatusCode.ERROR)
        parts, pid = parts_of(measured), measured.get("worker")
        began = end - int(sum(p.after + p.takes for p in parts) * PER_MILLISECOND)
        self._inside(span, parts, began, end, pid)
        span.end(end)

    def _inside(self, parent: Any, parts: Sequence[Part], at: int, end: int, pid: int | None) -> None:
        """Its parts one after the other, from `at`; roundings of milliseconds don't reach beyond `end`."""
        context = self._api.set_span_in_context(parent)
        for part in parts:
            begin = min(at + int(part.after * PER_MILLISECOND), end)
            named = {"process.pid": pid} if part.there and pid is not None else None
            span = self._tracer.start_span(part.name, context=context, start_time=begin, attributes=named)
            at = min(begin + int(part.takes * PER_MILLISECOND), end)
            self._inside(span, part.inside, begin, at, pid)
            span.end(at)

    def _parent(self, trace: Trace) -> Any:
        """The caller's span, as it said; the SDK's sampler decides about a request without one."""
        api = self._api
        if not trace.parent:
            return self._nowhere
        parent = api.SpanContext(
            int(trace.id, 16),
            int(trace.parent, 16),
            is_remote=True,
            trace_flags=api.TraceFlags(int(trace.sampled)),
            trace_state=api.TraceState.from_header([trace.state] if trace.state else []),
        )
        return api.set_span_in_context(api.NonRecordingSpan(parent), self._nowhere)

    def close(self) -> None:
        """Send what waits."""
        self._provider.shutdown()


def parts_of(measured: dict[str, Any]) -> list[Part]:
    """One after another, as `Answer.timings` and `Stream.timings` have them."""
    found, queue = list[Part](), measured.get("queue_ms", 0.0)
    if (compute := measured.get("compute_ms")) is not None:
        there, back = measured.get("there_ms", 0.0), measured.get("back_ms", 0.0)
        model = Part("compute", compute, there, there=True)
        found.append(Part("queue", queue))
        found.append(
            Part("batch", there + compute + back, inside=(model,)) if "there_ms" in measured else model
        )
    if (first := measured.get("first_token_ms")) is not None:
        waits = min(queue, first)
        inside = Part("queue", waits, there=True), Part("prefill", first - waits, there=True)
        found += [
            Part("first token", first, inside=inside),
            Part("stream", measured["stream_ms"], there=True),
        ]
    return found


def _attributes(
    call: RequestContext, status: int, model: str, version: str, measured: dict[str, Any]
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "http.request.method": call.method,
        "http.route": call.route.path,
        "http.response.status_code": status,
        "infer.request_id": call.request_id,
        **{f"infer.{name}": value for name, value in measured.items()},
    }
    if model:
        found |= {"infer.model": model, "infer.model.version": version}
    if call.error is not None:
        found["error.type"] = call.error.code
    return found


def exported() -> Spans:
    """Spans that are sent over OTLP and HTTP; raises `NotUsableError` without the packages."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise NotUsableError(f"traces need {error.name}", hint="pip install 'infer[otel]'") from error
    return Spans(BatchSpanProcessor(OTLPSpanExporter()))
