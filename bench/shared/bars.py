"""Bars as rows of one table of results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from bench.shared.results import TodaysRows


class Bar(msgspec.Struct, kw_only=True):
    """One demand on one piece of work. `got` is rival seconds over ours, or whatever `unit` says."""

    work: str
    rival: str
    need: float
    got: float | None = None  # None: nothing was measured, and `why` says so
    unit: str = "× its speed"
    below: bool = False  # whether `got` must stay below `need`
    ours: float | None = None  # seconds, or what `unit` compares
    theirs: float | None = None
    why: str = ""
    details: dict[str, Any] = {}  # seconds and errors of every engine of the run

    @property
    def is_met(self) -> bool:
        if self.got is None:
            return False
        return self.got <= self.need if self.below else self.got >= self.need

    @property
    def key(self) -> tuple[str, str, str]:
        return self.work, self.rival, self.unit


def todays_bars(
    name: str, kinds: Sequence[str], more: Callable[[list[Bar]], str] = lambda bars: "", **head: Any
) -> TodaysRows[Bar]:
    """Return the bars of today; `kinds`: how works begin, in the order of the table; `more`: what stands under it."""

    def page(bars: list[Bar]) -> str:
        return table(bars) + more(bars)

    return TodaysRows(name, Bar, page, order=lambda bar: _order(bar.work, kinds), field="bars", **head)


def _order(work: str, kinds: Sequence[str]) -> tuple[Any, ...]:
    """Return the sort key: by kind, sizes as numbers."""
    kind = next((index for index, name in enumerate(kinds) if work.startswith(name)), len(kinds))
    digits = "".join(letter if letter.isdigit() else " " for letter in work.partition(" ")[2])
    return kind, tuple(map(int, digits.split()))


def table(bars: Iterable[Bar]) -> str:
    """Return Markdown with a row per bar."""
    lines = ["| work | rival | ours | rival's | bar | got | |", "|" + "---|" * 7]
    for bar in bars:
        sign = "≤" if bar.below else "≥"
        got = (
            bar.why if bar.got is None else f"{bar.got:.4g}" if "perplexity" in bar.unit else f"{bar.got:.3g}"
        )
        met = "met" if bar.is_met else "**missed**"
        sides = f"{_number(bar, bar.ours)} | {_number(bar, bar.theirs)}"
        lines.append(
            f"| {bar.work} | {bar.rival} | {sides} | {sign} {bar.need:.3g} {bar.unit} | {got} | {met} |"
        )
    return "\n".join(lines) + "\n"


def _number(bar: Bar, value: float | None) -> str:
    """Format seconds as milliseconds; errors and perplexities as they are."""
    if value is None:
        return ""
    if "perplexity" in bar.unit:
        return f"{value:.5g}"
    return f"{value:.3g}" if "error" in bar.unit else f"{value * 1e3:.3g} ms"
