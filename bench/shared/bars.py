"""Bars as rows of one table: storage, merge of runs, rendering."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.shared.results import result_path

KINDS = ("lut4", "int8", "call", "MiniLM", "BERT", "ResNet", "nf4")


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


def keep(
    bars: Iterable[Bar],
    head: dict[str, Any],
    name: str = "kernels",
    kinds: Sequence[str] = KINDS,
    more: Callable[[list[Bar]], str] = lambda bars: "",
) -> tuple[Path, list[Bar]]:
    """Merge into today's file: a bar measured again replaces the former one. Returns the file and all its bars.

    `kinds`: how works begin, in the order of the table; `more`: what stands under it.
    """
    path = result_path(name)
    kept: dict[tuple[str, str, str], Bar] = {}
    if path.exists():
        before = json.loads(path.read_text())
        if before["machine"] == json.loads(json.dumps(head["machine"])):
            kept = {bar.key: bar for bar in msgspec.convert(before["bars"], list[Bar])}
    kept |= {bar.key: bar for bar in bars}
    merged = sorted(kept.values(), key=lambda bar: _order(bar.work, kinds))
    path.write_text(json.dumps({**head, "bars": msgspec.to_builtins(merged)}, indent=1) + "\n")
    path.with_suffix(".md").write_text(_heading(head) + table(merged) + more(merged))
    return path, merged


def _order(work: str, kinds: Sequence[str]) -> tuple[Any, ...]:
    """Return the sort key: by kind, sizes as numbers."""
    kind = next((index for index, name in enumerate(kinds) if work.startswith(name)), len(kinds))
    digits = "".join(letter if letter.isdigit() else " " for letter in work.partition(" ")[2])
    return kind, tuple(map(int, digits.split()))


def _heading(head: dict[str, Any]) -> str:
    machine = head["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
    return f"{machine['cpu']}, {head['threads']} threads, {head['date']}, {versions}\n\n"


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
