"""OpenTelemetry spans of requests (extra `otel`); their trace is that of `infer.serve.http.trace_context`.

There is one span per request, with children for queue, model and stream. Workers report times by a clock that all
processes of a machine share: their spans are created here, with their process id, so that one sampler decides and
nothing is lost with a worker that dies. The exporter is configured by OpenTelemetry's own variables, such as
OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_TRACES_SAMPLER.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...distribution import install
from ...errors import NotUsableError
from ..http.request_context import RequestContext
from ..http.trace_context import TraceContext

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

PER_MILLISECOND, PER_SECOND = 1_000_000, 1_000_000_000  # OpenTelemetry counts nanoseconds since 1970


@dataclass(frozen=True, slots=True)
class SpanPart:
    """A phase of a request, in milliseconds.

    `takes`: its duration; `after`: the gap before it, from the end of the previous part or the start of its
    parent; `there`: it ran in the worker process; `inside`: its children.
    """

    name: str
    takes: float
    after: float = 0.0
    there: bool = False
    inside: tuple[SpanPart, ...] = ()


class SpanRecorder:
    """Observer that records spans; `processor` is an SDK span processor, shut down by `close`."""

    def __init__(self, processor: SpanProcessor) -> None:
        from opentelemetry import context as otel
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import RandomIdGenerator, TracerProvider

        class Ids(RandomIdGenerator):
            """Id generator that returns the ids sent in the response headers, then random ones."""

            def __init__(self) -> None:
                self.span, self.trace = 0, 0

            def generate_span_id(self) -> int:
                wanted, self.span = self.span, 0
                return wanted or super().generate_span_id()

            def generate_trace_id(self) -> int:
                return self.trace or super().generate_trace_id()

        self._api, self._nowhere, self._ids = trace, otel.Context(), Ids()
        named = Resource.create({"service.name": "infer"})  # OTEL_SERVICE_NAME outranks it
        self._provider = TracerProvider(resource=named, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("infer.serve")

    def note(self, context: RequestContext, status: int, seconds: float, model: str, version: str) -> None:
        """Record the spans of a request that ends now, with child spans of its measured phases."""
        if not context.route.work or context.trace is None:
            return
        api, end = self._api, time.time_ns()
        measured = context.measure() if context.measure is not None else {}
        self._ids.span, self._ids.trace = int(context.trace.span, 16), int(context.trace.id, 16)
        span = self._tracer.start_span(
            f"{context.method} {context.route.path}",
            context=self._parent(context.trace),
            kind=api.SpanKind.SERVER,
            start_time=end - int(seconds * PER_SECOND),
            attributes=_attributes(context, status, model, version, measured),
        )
        if status >= 500:
            span.set_status(api.StatusCode.ERROR)
        parts, pid = span_parts(measured), measured.get("worker")
        began = end - int(sum(p.after + p.takes for p in parts) * PER_MILLISECOND)
        self._inside(span, parts, began, end, pid)
        span.end(end)

    def _inside(self, parent: Span, parts: Sequence[SpanPart], at: int, end: int, pid: int | None) -> None:
        """Record parts one after another from `at`; clip rounding errors at `end`."""
        within = self._api.set_span_in_context(parent)
        for part in parts:
            begin = min(at + int(part.after * PER_MILLISECOND), end)
            named = {"process.pid": pid} if part.there and pid is not None else None
            span = self._tracer.start_span(part.name, context=within, start_time=begin, attributes=named)
            at = min(begin + int(part.takes * PER_MILLISECOND), end)
            self._inside(span, part.inside, begin, at, pid)
            span.end(at)

    def _parent(self, trace: TraceContext) -> Any:
        """Return the context of the caller's span; without one the SDK's sampler decides."""
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
        """Flush waiting spans."""
        self._provider.shutdown()


def span_parts(measured: dict[str, Any]) -> list[SpanPart]:
    """Return the phases of a request in order, from the milliseconds that were measured."""
    found, queue = list[SpanPart](), measured.get("queue_ms", 0.0)
    if (compute := measured.get("compute_ms")) is not None:
        there, back = measured.get("there_ms", 0.0), measured.get("back_ms", 0.0)
        model = SpanPart("compute", compute, there, there=True)
        found.append(SpanPart("queue", queue))
        found.append(
            SpanPart("batch", there + compute + back, inside=(model,)) if "there_ms" in measured else model
        )
    if (first := measured.get("first_token_ms")) is not None:
        waits = min(queue, first)
        inside = SpanPart("queue", waits, there=True), SpanPart("prefill", first - waits, there=True)
        found += [
            SpanPart("first token", first, inside=inside),
            SpanPart("stream", measured["stream_ms"], there=True),
        ]
    return found


def _attributes(
    context: RequestContext, status: int, model: str, version: str, measured: dict[str, Any]
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "http.request.method": context.method,
        "http.route": context.route.path,
        "http.response.status_code": status,
        "infer.request_id": context.request_id,
        **{f"infer.{name}": value for name, value in measured.items()},
    }
    if model:
        found |= {"infer.model": model, "infer.model.version": version}
    if context.error is not None:
        found["error.type"] = context.error.code
    return found


def otlp_spans() -> SpanRecorder:
    """Return spans exported over OTLP/HTTP; raise `NotUsableError` without the packages."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise NotUsableError(f"traces need {error.name}", hint=install("otel")) from error
    return SpanRecorder(BatchSpanProcessor(OTLPSpanExporter()))
