"""Metrics of language models: tokens and latencies by the event loop, cache and steps by the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ...llm.engine.stats import EngineStats
from .metrics import MODEL, SECONDS, Metrics, ServedMetrics
from .prometheus_text import Family, Histogram, LogHistogram, Registry, Scalar

FIRST = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)


class LLMMetrics(ServedMetrics):
    """Metrics of one language model."""

    def __init__(self, metrics: Metrics, shared: LLMMetricFamilies, model: str, version: str) -> None:
        super().__init__(metrics, model, version)
        self._shared = shared
        self.first_token_times, self.inter_token_times = LogHistogram(), LogHistogram()
        self._decode = shared.decode.labels(*self._labels)
        self._first_token = shared.first_token.labels(*self._labels)
        self._queue, self._prefill = (
            family.labels(*self._labels) for family in (metrics.queue_seconds, shared.prefill)
        )
        self._inter_token, self._generation_tokens = (
            shared.inter_token.labels(*self._labels),
            shared.generation_tokens.labels(*self._labels),
        )
        self.unknown_fields = shared.unknown_fields.labels(*self._labels)

    def add_step_tokens(self, stats: Callable[[], EngineStats]) -> None:
        """Register the engine's histogram of tokens per step."""

        def read() -> tuple[list[int], float]:
            now = stats()
            return now.step_tokens, now.prefill_tokens + now.decode_tokens

        self._metrics.batch_tokens.labels(*self._labels).set_function(read)

    @property
    def generation_tokens(self) -> int:
        """Tokens generated since the start."""
        return int(self._generation_tokens.value)

    def first_token(self, seconds: float, queued: float) -> None:
        """Record a prompt's first token `seconds` after admission, `queued` of them in the queue."""
        self._first_token.observe(seconds)
        self._queue.observe(min(queued, seconds))
        self._prefill.observe(max(seconds - queued, 0.0))
        self.first_token_times.observe(seconds)

    def tokens(self, count: int, seconds: float | None) -> None:
        """Record `count` tokens of a completion, `seconds` after its last; None for its first."""
        self._generation_tokens.inc(count)
        if seconds is not None:
            self._inter_token.observe(seconds / count)
            self.inter_token_times.observe(seconds / count)

    def finished(self, reason: str, seconds: float) -> None:
        """Record the end of a completion, `seconds` after the first token of its request."""
        self._decode.observe(seconds)
        self._shared.finished.labels(*self._labels, reason).inc()


class LLMMetricFamilies:
    """Metric families that all language models share."""

    def __init__(self, registry: Registry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Family[Histogram]:
            return registry.histogram(f"infer_{name}", text, MODEL, buckets)

        self.first_token = histogram(
            "time_to_first_token_seconds", "Time to first token in seconds, from admission", FIRST
        )
        text = "Prefill time in seconds, from a prompt's first step to its first token"
        self.prefill = histogram("prefill_seconds", text, SECONDS)
        text = "Time between two tokens of one completion in seconds; tokens of one step share it equally"
        self.inter_token = histogram("inter_token_seconds", text, BETWEEN)
        self.decode = histogram(
            "decode_seconds",
            "Decode time in seconds, from a request's first token to the end of a completion",
            SECONDS,
        )
        self.generation_tokens = registry.counter("infer_generation_tokens", "Tokens generated", MODEL)
        self.finished = registry.counter(
            "infer_completions", "Completions finished, by reason", (*MODEL, "reason")
        )
        text = "Unknown request fields, ignored"
        self.unknown_fields = registry.counter("infer_unknown_fields", text, MODEL)


class EngineCollector:
    """Counters of the engines, read at each scrape; `stats` maps labels to an `EngineStats` getter."""

    COUNTERS = {
        "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache", "prefix_queries"),
        "prefix_cache_hits": ("Prompt tokens found in the prefix cache", "prefix_hits"),
        "prefix_cache_evictions": ("Prefix-cache pages evicted", "evictions"),
        "preemptions": ("Sequences preempted and recomputed", "preemptions"),
        "spec_draft_tokens": ("Draft tokens proposed by speculative decoding", "draft_tokens"),
        "spec_accepted_tokens": ("Draft tokens accepted", "accepted_tokens"),
        "prefill_tokens": (
            "Prompt tokens computed, recomputed ones included",
            "prefill_tokens",
        ),
        "engine_steps": ("Engine steps", "steps"),
    }
    PHASES = ("scheduling", "step", "sampling", "output")

    def __init__(self) -> None:
        self.stats: dict[tuple[str, str], Callable[[], EngineStats]] = {}

    def collect(self) -> Iterable[Family[Scalar]]:
        read = {labels: stats() for labels, stats in self.stats.items()}
        usage = Family(
            "gauge", "infer_kv_cache_usage_ratio", "Fraction of KV-cache pages in use", MODEL, Scalar
        )
        text = "Engine thread time in seconds, by phase; `step` is the model"
        spent = Family("counter", "infer_engine_seconds_total", text, (*MODEL, "phase"), Scalar)
        for labels, stats in read.items():
            usage.labels(*labels).set(stats.pages_used / max(stats.pages_total, 1))
            for phase in self.PHASES:
                spent.labels(*labels, phase).set(getattr(stats, f"{phase}_seconds"))
        yield from (usage, spent)
        for name, (text, field) in self.COUNTERS.items():
            family = Family("counter", f"infer_{name}_total", text, MODEL, Scalar)
            for labels, stats in read.items():
                family.labels(*labels).set(getattr(stats, field))
            yield family
