"""Counters, gauges and histograms in Prometheus' text format 0.0.4, written by one thread and cheap to scrape.

The format: https://prometheus.io/docs/instrumenting/exposition_formats/. prometheus-client takes 20 times as long over
the same numbers, on the thread that answers requests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

Labels = tuple[str, ...]


class Child(Protocol):
    """One metric with its labels' values; `lines` are its samples."""

    def lines(self) -> Iterator[str]: ...


C = TypeVar("C", bound=Child)


class Family(Generic[C]):
    """All of one name; `labels(*values)` is the child of those values, made when it is first asked for."""

    def __init__(
        self, kind: str, name: str, text: str, names: Sequence[str], make: Callable[[str, str], C]
    ) -> None:
        self.name, self.names, self.children = name, tuple(names), dict[Labels, C]()
        self._make = make
        self._head = f"# HELP {name} {escape(text)}\n# TYPE {name} {kind}\n"

    def labels(self, *values: str) -> C:
        child = self.children.get(values)
        if child is None:
            pairs = sorted(zip(self.names, values, strict=True))
            inside = ",".join(f'{name}="{escape(value, quote=True)}"' for name, value in pairs)
            child = self.children[values] = self._make(self.name, inside)
        return child

    def lines(self) -> Iterator[str]:
        if self.children:
            yield self._head
            for child in self.children.values():
                yield from child.lines()


class Count:
    """A number that grows, or, of a gauge, that is set."""

    __slots__ = ("_start", "value")

    def __init__(self, name: str, labels: str) -> None:
        self.value: float = 0
        self._start = f"{name}{{{labels}}} " if labels else f"{name} "

    def inc(self, amount: float = 1) -> None:
        self.value += amount

    def set(self, value: float) -> None:
        self.value = value

    def lines(self) -> Iterator[str]:
        yield f"{self._start}{number(self.value)}\n"


class Watched(Count):
    """A gauge whose value is asked for at each scrape."""

    __slots__ = ("_value",)

    def set_function(self, value: Callable[[], float]) -> None:
        self._value = value

    def lines(self) -> Iterator[str]:
        yield f"{self._start}{number(self._value())}\n"


class Spread:
    """A histogram's child: how many values were at most each bound, and their sum."""

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
        """Ask at each scrape: counts by bucket, as many as there are yet, and the sum of the values."""
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
        yield f"{self._tail[0]}{number(self.total)}\n{self._tail[1]}{so_far}.0\n"


class Source(Protocol):
    def lines(self) -> Iterator[str]: ...


class Registry:
    """Everything that one scrape shows, in the order in which it was made."""

    def __init__(self) -> None:
        self.sources: list[Source] = []

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Family[Count]:
        """`name` without `_total`."""
        return self._keep(Family("counter", f"{name}_total", text, labels, Count))

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Family[Count]:
        return self._keep(Family("gauge", name, text, labels, Count))

    def watched(
        self, name: str, text: str, labels: Sequence[str] = (), kind: str = "gauge"
    ) -> Family[Watched]:
        return self._keep(Family(kind, name, text, labels, Watched))

    def histogram(
        self, name: str, text: str, labels: Sequence[str], bounds: tuple[float, ...]
    ) -> Family[Spread]:
        return self._keep(
            Family("histogram", name, text, labels, lambda own, inside: Spread(own, inside, bounds))
        )

    def read(self, collect: Callable[[], Iterable[Family[Count]]]) -> None:
        """Families that are made anew at each scrape."""
        self.sources.append(Collected(collect))

    def _keep(self, family: Family[C]) -> Family[C]:
        self.sources.append(family)
        return family

    def text(self) -> bytes:
        return "".join(line for source in self.sources for line in source.lines()).encode()


class Collected:
    def __init__(self, collect: Callable[[], Iterable[Family[Count]]]) -> None:
        self._collect = collect

    def lines(self) -> Iterator[str]:
        for family in self._collect():
            yield from family.lines()


def reading(kind: str, name: str, text: str, labels: Sequence[str]) -> Family[Count]:
    """A family for `Registry.read`."""
    return Family(kind, name, text, labels, Count)


def number(value: float) -> str:
    """As the format has it: what is not finite is NaN, +Inf, -Inf."""
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))


def escape(text: str, *, quote: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text
