"""What is counted of language models: tokens and their times by the event loop, pages and schedule by the engine."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from .metrics import MODEL, SECONDS, Metrics
from .recent import Times

FIRST = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)


class GenerationMetrics:
    """The counters of one language model, bound to its labels; written by the event loop's thread only."""

    def __init__(self, metrics: Metrics, shared: Shared, model: str, version: str) -> None:
        self._metrics, self._shared, self._labels = metrics, shared, (model, version)
        metrics.begin(model, version)
        self.first_times, self.between_times = Times(), Times()
        self._decode = shared.decode.labels(*self._labels)
        self._first_token = shared.first_token.labels(*self._labels)
        self._between = shared.between.setdefault(self._labels, Between())
        self.prompt_tokens = metrics.prompt_tokens.labels(*self._labels)
        self.deadline_exceeded = metrics.deadline_exceeded.labels(*self._labels)
        self.unknown_fields = shared.unknown_fields.labels(*self._labels)

    @property
    def made(self) -> int:
        """Tokens since the start."""
        return self._between.tokens

    def first_token(self, seconds: float) -> None:
        """A prompt got its first token so long after it was admitted."""
        self._first_token.observe(seconds)
        self.first_times.observe(seconds)

    def tokens(self, count: int, seconds: float | None) -> None:
        """A completion got `count` tokens, `seconds` after its last; None: they are its first."""
        self._between.tokens += count
        if seconds is not None:
            self._between.observe(seconds / count)
            self.between_times.observe(seconds / count)

    def finished(self, reason: str, seconds: float) -> None:
        """A completion ended, so long after the first token of its request."""
        self._decode.observe(seconds)
        self._shared.finished.labels(*self._labels, reason).inc()

    def rejected(self, reason: str) -> None:
        self._metrics.rejected.labels(*self._labels, reason).inc()

    def cancelled(self, stage: str) -> None:
        self._metrics.cancelled.labels(*self._labels, stage).inc()


class Between:
    """Tokens made and the times between them, of one model: counted for every token, so without a lock."""

    def __init__(self) -> None:
        self.tokens, self.counts, self.total = 0, [0] * (len(BETWEEN) + 1), 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BETWEEN, seconds)] += 1
        self.total += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus wants them."""
        return list(zip((*map(str, BETWEEN), "+Inf"), accumulate(self.counts), strict=True))


class Shared:
    """The families that all language models have in common; a collector of those kept in `Between`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.between: dict[tuple[str, str], Between] = {}
        registry.register(self)  # type: ignore[arg-type]

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"infer_{name}", text, (*MODEL, *labels), registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"infer_{name}", text, MODEL, registry=registry, buckets=buckets)

        self.first_token = histogram(
            "time_to_first_token_seconds", "From admission to a prompt's first token", FIRST
        )
        self.decode = histogram(
            "decode_seconds", "From a request's first token to the end of a completion", SECONDS
        )
        self.finished = counter("completions", "Completions that ended", "reason")
        self.unknown_fields = counter("unknown_fields", "Fields of requests that mean nothing here")

    def collect(self) -> Iterable[Metric]:
        made = CounterMetricFamily("infer_generation_tokens", "Tokens made", labels=MODEL)
        text = "Between two tokens of one completion; tokens that come together share"
        times = HistogramMetricFamily("infer_inter_token_seconds", text, labels=MODEL)
        for labels, between in self.between.items():
            made.add_metric(labels, between.tokens)
            times.add_metric(labels, between.buckets(), between.total)
        yield from (made, times)


class EngineCollector:
    """The engines' own numbers, read when somebody scrapes. `stats`: of each model, its `EngineStats`."""

    COUNTERS = {
        "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache", "prefix_queries"),
        "prefix_cache_hits": ("Prompt tokens found there", "prefix_hits"),
        "preemptions": ("Sequences that gave their pages back and were computed again", "preemptions"),
        "spec_draft_tokens": ("Tokens proposed by speculation", "draft_tokens"),
        "spec_accepted_tokens": ("Proposed tokens that were kept", "accepted_tokens"),
        "prefill_tokens": (
            "Prompt tokens that the model read, those computed again included",
            "prefill_tokens",
        ),
        "engine_steps": ("Steps of the engine", "steps"),
    }
    PHASES = ("scheduling", "step", "sampling", "output")

    def __init__(self) -> None:
        self.stats: dict[tuple[str, str], Callable[[], Any]] = {}

    def collect(self) -> Iterable[Metric]:
        if not self.stats:
            return
        read = {labels: stats() for labels, stats in self.stats.items()}
        usage = GaugeMetricFamily("infer_kv_cache_usage_ratio", "Share of the pages in use", labels=MODEL)
        spent = CounterMetricFamily(
            "infer_engine_seconds", "Of the engine's thread; `step` is the model", labels=(*MODEL, "phase")
        )
        for labels, stats in read.items():
            usage.add_metric(labels, stats.pages_used / max(stats.pages_total, 1))
            for phase in self.PHASES:
                spent.add_metric((*labels, phase), getattr(stats, f"{phase}_seconds"))
        yield from (usage, spent)
        for name, (text, field) in self.COUNTERS.items():
            family = CounterMetricFamily(f"infer_{name}", text, labels=MODEL)
            for labels, stats in read.items():
                family.add_metric(labels, getattr(stats, field))
            yield family
