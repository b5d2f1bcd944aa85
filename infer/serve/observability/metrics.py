"""Metrics of the server in one Prometheus registry, and the same events as KServe statistics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ...errors import InferError, OverloadedError
from .prometheus_text import CallbackGauge, Family, Histogram, LogHistogram, Registry, Scalar

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
TOKENS = tuple(1 << power for power in range(15))
SHARES = (0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75)
MODEL = ("model", "version")


class Duration(msgspec.Struct):
    """KServe's pair of event count and total nanoseconds."""

    count: int = 0
    ns: int = 0

    def add(self, seconds: float, times: int = 1) -> None:
        self.count += times
        self.ns += int(seconds * 1e9) * times


class InferenceStats(msgspec.Struct):
    success: Duration = msgspec.field(default_factory=Duration)
    fail: Duration = msgspec.field(default_factory=Duration)
    queue: Duration = msgspec.field(default_factory=Duration)
    compute_input: Duration = msgspec.field(default_factory=Duration)
    compute_infer: Duration = msgspec.field(default_factory=Duration)
    compute_output: Duration = msgspec.field(default_factory=Duration)
    cache_hit: Duration = msgspec.field(default_factory=Duration)
    cache_miss: Duration = msgspec.field(default_factory=Duration)


class BatchStats(msgspec.Struct):
    batch_size: int
    compute_input: Duration = msgspec.field(default_factory=Duration)
    compute_infer: Duration = msgspec.field(default_factory=Duration)
    compute_output: Duration = msgspec.field(default_factory=Duration)


class ServedMetrics:
    """Metrics of one model of either kind, bound to its labels; written by the event loop's thread only."""

    def __init__(self, metrics: Metrics, model: str, version: str) -> None:
        self._metrics, self._labels = metrics, (model, version)
        self.deadline_exceeded = metrics.deadline_exceeded.labels(model, version)
        self.prompt_tokens = metrics.prompt_tokens.labels(model, version)
        metrics.create_series(model, version)

    def rejected(self, error: InferError) -> None:
        """Count a request that was refused on arrival."""
        reason = "overloaded" if isinstance(error, OverloadedError) else error.code
        self._metrics.rejected.labels(*self._labels, reason).inc()

    def cancelled(self, stage: str) -> None:
        self._metrics.cancelled.labels(*self._labels, stage).inc()


class ModelMetrics(ServedMetrics):
    """Metrics of one tensor model."""

    def __init__(self, metrics: Metrics, model: str, version: str) -> None:
        super().__init__(metrics, model, version)
        self.queue_seconds = metrics.queue_seconds.labels(*self._labels)
        self.compute_seconds = metrics.compute_seconds.labels(*self._labels)
        self.batch_size = metrics.batch_size.labels(*self._labels)
        self.batch_tokens = metrics.batch_tokens.labels(*self._labels)
        self.padding_ratio = metrics.padding_ratio.labels(*self._labels)
        self.nonfinite = metrics.nonfinite.labels(*self._labels)
        self.worker_deaths = metrics.worker_deaths.labels(*self._labels)
        self._dispatch = {
            r: metrics.dispatch.labels(*self._labels, r) for r in ("full", "idle", "deadline", "retry")
        }
        self.stats, self.batches = InferenceStats(), dict[int, BatchStats]()
        self.inferences = self.executions = self.last_ms = 0

    def dispatched(self, reason: str) -> None:
        self._dispatch[reason].inc()

    def executed(self, rows: int, assemble: float, compute: float, cut: float, padding: float) -> None:
        """Record one batch: its rows, the seconds of its three phases, and its share of padding."""
        self.batch_size.observe(rows)
        self.compute_seconds.observe(compute)
        self.padding_ratio.observe(padding)
        self.executions += 1
        self.last_ms = int(time.time() * 1000)
        batch = self.batches.setdefault(rows, BatchStats(rows))
        for name, seconds in (
            ("compute_input", assemble),
            ("compute_infer", compute),
            ("compute_output", cut),
        ):
            getattr(batch, name).add(seconds)

    def failed(self, seconds: float) -> None:
        self.stats.fail.add(seconds)

    def answered(
        self, rows: int, waits: Sequence[tuple[float, int]], assemble: float, compute: float, cut: float
    ) -> None:
        """Record the requests of a successful batch: rows, and (wait seconds, count) pairs."""
        for seconds, requests in waits:
            self.queue_seconds.observe(seconds, requests)
        self.inferences += rows
        stats, times = self.stats, sum([requests for _, requests in waits])
        waited = sum([seconds * requests for seconds, requests in waits])
        stats.compute_input.add(assemble, times)
        stats.compute_infer.add(compute, times)
        stats.compute_output.add(cut, times)
        for duration, own in ((stats.queue, 0.0), (stats.success, assemble + compute + cut)):
            duration.count += times
            duration.ns += int((waited + own * times) * 1e9)


class Metrics:
    """All metrics of one server, in a registry of its own; names and labels are documented."""

    def __init__(self, version: str) -> None:
        self.registry = own = Registry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Family[Scalar]:
            return own.counter(f"infer_{name}", text, (*MODEL, *labels))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Family[Histogram]:
            return own.histogram(f"infer_{name}", text, MODEL, buckets)

        self.requests = counter("requests", "Responses by status code and API", ("code", "api"))
        self.dispatch = counter("dispatch", "Batches dispatched, by reason", ("reason",))
        self.rejected = counter("rejected", "Requests rejected on arrival, by reason", ("reason",))
        self.cancelled = counter("cancelled", "Requests whose client disconnected, by stage", ("stage",))
        self.deadline_exceeded = counter("deadline_exceeded", "Requests whose deadline expired")
        self.worker_deaths = counter(
            "worker_deaths", "Worker processes of the model that died or were killed"
        )
        self.nonfinite = counter("nonfinite_outputs", "Output values that were NaN or infinite")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens received")
        self.queue_seconds = histogram(
            "queue_seconds", "Queue time in seconds, from arrival to the start of the batch", SECONDS
        )
        self.request_seconds = histogram(
            "request_seconds",
            "Request latency in seconds, from the end of the headers to the response",
            SECONDS,
        )
        self.compute_seconds = histogram(
            "compute_seconds", "Compute time of the model in seconds, per batch", SECONDS
        )
        self.batch_size = histogram("batch_size", "Rows per batch", ROWS)
        text = "Tokens per batch (rows times length, without padding), or per engine step of a language model"
        self.batch_tokens = histogram("batch_tokens", text, TOKENS)
        self.padding_ratio = histogram("padding_ratio", "Fraction of a batch that is padding", SHARES)
        self._load = own.gauge(
            "infer_model_load_seconds", "Model load time in seconds, by phase", (*MODEL, "phase")
        )
        self._gauges: dict[str, Family[CallbackGauge]] = {}
        self._series: dict[tuple[str, str, str, str], tuple[Scalar, Histogram]] = {}
        self.times: dict[str, LogHistogram] = {}  # of a model's requests that were answered with success
        own.gauge("infer_build_info", "Version of infer; the value is always 1", ("infer",)).labels(
            version
        ).set(1)

    def create_series(self, model: str, version: str) -> None:
        """Create the counters at 0, so that the first event is visible as a rate."""
        self.rejected.labels(model, version, "overloaded")
        for stage in ("queued", "running"):
            self.cancelled.labels(model, version, stage)

    def model(self, name: str, version: str) -> ModelMetrics:
        return ModelMetrics(self, name, version)

    def add_gauge(self, what: str, text: str, model: str, version: str, value: Callable[[], float]) -> None:
        """Register a gauge whose value is computed at each scrape."""
        if what not in self._gauges:
            self._gauges[what] = self.registry.callback(f"infer_{what}", text, MODEL)
        self._gauges[what].labels(model, version).set_function(value)

    def remove_gauges(self, model: str, version: str) -> None:
        """Remove the gauges of an unloaded model; its counters stay."""
        for family in self._gauges.values():
            family.series.pop((model, version), None)

    def add_process_gauges(self, body_bytes: Callable[[], float]) -> None:
        """Register gauges of request body memory and event-loop tasks."""
        text = "Bytes of request bodies in memory"
        self.registry.callback("infer_body_bytes", text).labels().set_function(body_bytes)
        text = "Tasks on the event loop"
        tasks = self.registry.callback("infer_event_loop_tasks", text).labels()
        tasks.set_function(lambda: len(asyncio.all_tasks()))

    def add_dropped_lines(self, value: Callable[[], float]) -> None:
        """Register the counter of lines that the request log lost."""
        text = "Request log lines dropped"
        self.registry.callback("infer_log_dropped_total", text, kind="counter").labels().set_function(value)

    def record_load_seconds(self, model: str, version: str, phase: str, seconds: float) -> None:
        self._load.labels(model, version, phase).set(seconds)

    def request(self, model: str, version: str, status: int, api: str, *seconds: float) -> None:
        """Record responses with one status, each with its own seconds."""
        key = (model, version, str(status), api)
        series = self._series.get(key)
        if series is None:
            series = self.requests.labels(*key), self.request_seconds.labels(model, version)
            self._series[key] = series
        series[0].inc(len(seconds))
        times = None
        if status == 200 and model:
            times = self.times.get(model) or self.times.setdefault(model, LogHistogram())
        for one in seconds:
            series[1].observe(one)
            if times is not None:
                times.observe(one)

    def values_by_label(self, family: Family[Scalar], model: str, label: str = "") -> dict[str, int]:
        """Return a counter's values for one model, by one of its labels."""
        at = family.names.index(label) if label else None
        found: dict[str, int] = {}
        for values, series in family.series.items():
            if values[0] == model:
                value = "" if at is None else values[at]
                found[value] = found.get(value, 0) + int(series.value)
        return found

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return self.registry.text()


def stats_dict(model: ModelMetrics) -> dict[str, Any]:
    """Return the inference fields of a KServe statistics response."""
    return {
        "last_inference": model.last_ms,
        "inference_count": model.inferences,
        "execution_count": model.executions,
        "inference_stats": model.stats,
        "batch_stats": [model.batches[rows] for rows in sorted(model.batches)],
    }
