"""Counters, gauges and histograms in Prometheus' text format 0.0.4; one writer thread, cheap to scrape.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/. prometheus-client takes 20 times as long to
render the same numbers, on the thread of the event loop.

`LogHistogram` is not exported: its buckets are fine enough for percentiles, which `infer top` and the status page
compute from the difference of two snapshots.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import exp2, log2
from typing import Generic, Protocol, TypeVar

Labels = tuple[str, ...]
PER_OCTAVE = 8  # a bucket is 9 % wide, so a percentile read from it is within 4.5 %
UNIT = 1e-6  # seconds at which bucket 0 begins


class Samples(Protocol):
    """Source of samples, as lines: a time series, a family of them, or what builds families at each scrape."""

    def lines(self) -> Iterator[str]: ...


C = TypeVar("C", bound=Samples)


class Family(Generic[C]):
    """All series of one metric name; `labels(*values)` returns one, created on first use."""

    def __init__(
        self, kind: str, name: str, text: str, names: Sequence[str], make: Callable[[str, str], C]
    ) -> None:
        self.name, self.names, self.series = name, tuple(names), dict[Labels, C]()
        self._make = make
        self._head = f"# HELP {name} {escape(text)}\n# TYPE {name} {kind}\n"

    def labels(self, *values: str) -> C:
        series = self.series.get(values)
        if series is None:
            pairs = sorted(zip(self.names, values, strict=True))
            inside = ",".join(f'{name}="{escape(value, quote=True)}"' for name, value in pairs)
            series = self.series[values] = self._make(self.name, inside)
        return series

    def lines(self) -> Iterator[str]:
        if self.series:
            yield self._head
            for series in self.series.values():
                yield from series.lines()


class Scalar:
    """Value of a counter or gauge."""

    __slots__ = ("_start", "value")

    def __init__(self, name: str, labels: str) -> None:
        self.value: float = 0
        self._start = f"{name}{{{labels}}} " if labels else f"{name} "

    def inc(self, amount: float = 1) -> None:
        self.value += amount

    def set(self, value: float) -> None:
        self.value = value

    def lines(self) -> Iterator[str]:
        yield f"{self._start}{format_number(self.value)}\n"


class CallbackGauge(Scalar):
    """Gauge whose value is computed at each scrape."""

    __slots__ = ("_value",)

    def set_function(self, value: Callable[[], float]) -> None:
        self._value = value

    def lines(self) -> Iterator[str]:
        yield f"{self._start}{format_number(self._value())}\n"


class Histogram:
    """Histogram with cumulative buckets: counts per upper bound, and the sum of values."""

    __slots__ = ("_bounds", "_read", "_starts", "_tail", "counts", "total")

    def __init__(self, name: str, labels: str, bounds: tuple[float, ...]) -> None:
        self.counts, self.total = [0] * (len(bounds) + 1), 0.0
        self._bounds = bounds
        self._read: Callable[[], tuple[Sequence[int], float]] | None = None
        inside = f"{labels}," if labels else ""
        self._starts = [f'{name}_bucket{{{inside}le="{bound}"}} ' for bound in (*bounds, "+Inf")]
        own = f"{{{labels}}}" if labels else ""
        self._tail = f"{name}_sum{own} ", f"{name}_count{own} "

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    def set_function(self, read: Callable[[], tuple[Sequence[int], float]]) -> None:
        """Read the histogram at each scrape: counts by bucket and the sum of the values."""
        self._read = read

    def lines(self) -> Iterator[str]:
        if self._read is not None:
            counts, self.total = self._read()
            last = len(self.counts) - 1
            self.counts = [*counts[:last], *([0] * (last - len(counts))), sum(counts[last:])]
        so_far = 0
        for start, count in zip(self._starts, self.counts, strict=True):
            so_far += count
            yield f"{start}{so_far}.0\n"
        yield f"{self._tail[0]}{format_number(self.total)}\n{self._tail[1]}{so_far}.0\n"


class Registry:
    """All metric families of one scrape, in registration order."""

    def __init__(self) -> None:
        self.sources: list[Samples] = []

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Family[Scalar]:
        """Register a counter; `name` without `_total`."""
        return self._keep(Family("counter", f"{name}_total", text, labels, Scalar))

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Family[Scalar]:
        return self._keep(Family("gauge", name, text, labels, Scalar))

    def callback(
        self, name: str, text: str, labels: Sequence[str] = (), kind: str = "gauge"
    ) -> Family[CallbackGauge]:
        return self._keep(Family(kind, name, text, labels, CallbackGauge))

    def histogram(
        self, name: str, text: str, labels: Sequence[str], bounds: tuple[float, ...]
    ) -> Family[Histogram]:
        return self._keep(
            Family("histogram", name, text, labels, lambda own, inside: Histogram(own, inside, bounds))
        )

    def read(self, collect: Callable[[], Iterable[Family[Scalar]]]) -> None:
        """Register families that are rebuilt at each scrape."""
        self.sources.append(Collector(collect))

    def _keep(self, family: Family[C]) -> Family[C]:
        self.sources.append(family)
        return family

    def text(self) -> bytes:
        return "".join(line for source in self.sources for line in source.lines()).encode()


class Collector:
    """Metric source whose families are rebuilt at each scrape."""

    def __init__(self, collect: Callable[[], Iterable[Family[Scalar]]]) -> None:
        self._collect = collect

    def lines(self) -> Iterator[str]:
        for family in self._collect():
            yield from family.lines()


def format_number(value: float) -> str:
    """Format a value as the text format has it: NaN, +Inf and -Inf for non-finite ones."""
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))


def escape(text: str, *, quote: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text


class LogHistogram:
    """Counts since the start: bucket i holds UNIT·2^(i/8) to UNIT·2^((i+1)/8) seconds."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def observe(self, seconds: float) -> None:
        index = int(log2(seconds / UNIT) * PER_OCTAVE) if seconds > UNIT else 0
        self.counts[index] = self.counts.get(index, 0) + 1


def percentile(counts: Mapping[int, int], share: float) -> float | None:
    """Return the seconds below which `share` of the counts lie, to half a bucket; None without counts."""
    left = share * sum(counts.values())
    for index in sorted(counts):
        left -= counts[index]
        if left <= 0:
            return UNIT * exp2((index + 0.5) / PER_OCTAVE)
    return None
