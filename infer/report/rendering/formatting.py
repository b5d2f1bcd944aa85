"""Formatting of figures, speeds and commands, for the terminal and the HTML report."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...options import command_line, fields
from ...plan import IN_MEMORY, Plan
from ...results import Metric

if TYPE_CHECKING:
    from ...latency import Paired  # which imports torch

FEW_SECONDS = 5e-6  # that a call loses: said as such, since of a call of 15 µs one more is "1.07x slower"
MUCH = 0.03  # of an artifact: rows of more are named beside it


def seconds(value: float | None) -> str:
    """Format seconds as `3.21 ms`; an unknown time is a dash."""
    if value is None:
        return "-"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale:
            return f"{_three(value / scale)} {unit}"
    return f"{_three(value / 1e-9)} ns" if value > 0 else "0 s"


def size(num_bytes: float | None) -> str:
    """Format bytes as `22.7 MB`, in powers of ten; an unknown size is a dash."""
    if num_bytes is None:
        return "-"
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{_three(num_bytes / scale)} {unit}"
    return f"{num_bytes:.0f} B"


def share(value: float | None) -> str:
    """Format a share as `99.7 %`, never rounded up to 100."""
    if value is None:
        return "-"
    if value in (0, 1):
        return f"{100 * value:.0f} %"
    percent = 100 * value
    if 99.95 <= percent < 100:
        return f"{min(percent, 99.999):.3f} %"
    return f"{percent:.1f} %"


def of_ceiling(value: float | None, *, in_cache: bool = False) -> str:
    """Format the share of the ceiling: `63.0 %`, `63.0 % (in cache)`, `≥ 100 %` above a ceiling measured too low."""
    text = "≥ 100 %" if value is not None and value >= 1 else share(value)
    return f"{text} (in cache)" if in_cache else text


def number(value: float | int | str | bool | None, unit: str = "") -> str:
    """Format a finding's value with its unit."""
    if value is None:
        return "-"
    if isinstance(value, bool | str):
        return str(value).lower() if isinstance(value, bool) else value
    if unit == "s":
        return seconds(value)
    if unit == "B":
        return size(value)
    if unit in ("B/s", "FLOP/s"):
        return f"{_three(value / 1e9)} G{unit}"
    text = f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    return f"{text} {unit}".strip()


def _three(value: float) -> str:
    """Format a number with three significant digits, without an exponent."""
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def speed(pair: Paired) -> str:
    """Format a paired timing: `faster 2.10x`, `slower 1.20x`, `same`, `within noise`."""
    if pair.verdict == "faster":
        return f"faster {pair.speedup:.2f}x"
    return f"slower {slowdown(pair)}" if pair.verdict == "slower" else pair.verdict


def slowdown(pair: Paired) -> str:
    """Format how much slower a call is: `1.20x`, or `1.40 µs` where it is no more than `FEW_SECONDS`."""
    lost = pair.a.p50 - pair.b.p50
    return seconds(lost) if 0 < lost <= FEW_SECONDS else f"{pair.ratio:.2f}x"


def speeds(pairs: Sequence[tuple[int, Paired]]) -> str:
    """Format paired timings of all batch sizes: `faster 2.10x (batch 1), 1.34x (batch 8)`, `same`."""
    phrases = [speed(pair) for _, pair in pairs]
    if len(set(phrases)) == 1:
        return phrases[0]
    if len({pair.verdict for _, pair in pairs}) == 1:
        phrases[1:] = [phrase.partition(" ")[2] for phrase in phrases[1:]]
    return ", ".join(f"{phrase} (batch {batch})" for phrase, (batch, _) in zip(phrases, pairs, strict=True))


def faithful(metrics: Sequence[Metric]) -> str:
    """Choose the headline metric: top-1 agreement, else equal values, else the relative error."""
    for name, phrase in (
        ("top1", "top-1 agreement"),
        ("exact", "equal"),
        ("relative_error", "relative error"),
    ):
        values = [metric.number for metric in metrics if metric.name == name]
        known = [float(value) for value in values if value is not None]
        if known:
            worst = max(known) if name == "relative_error" else min(known)
            text = f"{100 * worst:.2g} %" if name == "relative_error" else share(worst)
            return f"{phrase} {text}"
    return "fidelity not measured"


def smaller(original: int | None, now: int) -> str | None:
    """Format the ratio of two sizes in bytes: `3.9x smaller`."""
    if not original or not now:
        return None
    ratio = original / now
    if 0.97 <= ratio <= 1.03:
        return "same size"
    return f"{ratio:.1f}x smaller" if ratio > 1 else f"{1 / ratio:.1f}x larger"


def with_rows(now: int, rows: int) -> str:
    """Return `, 1.15 MB of rows to check it with` where these rows are large beside an artifact, else ""."""
    return f", {size(rows)} of rows to check it with" if rows > MUCH * now else ""


def command(plan: Plan, output: str) -> str:
    """Return the command line that makes this artifact again; of a module in memory the call."""
    from ...fidelity.thresholds import default_kv_dtype  # which imports torch

    if plan.kv_dtype == default_kv_dtype(plan):
        plan = plan.with_(kv_dtype="auto")
    if plan.source.startswith(IN_MEMORY):
        return _call(plan, output)
    source, *options = command_line(plan)
    return shlex.join(["infer", "optimize", source, "--output", output, *options])


def _call(plan: Plan, output: str) -> str:
    """Return the call of `infer.compile` that makes an artifact of a module in memory again."""
    values = {field.name: (getattr(plan, field.name), field.default) for field in fields(Plan)}
    asked = {
        name: value for name, (value, default) in values.items() if value != default and name != "source"
    }
    named = "".join(f", {name}={value!r}" for name, value in asked.items())
    return f"infer.compile(model, data, output={output!r}{named})"


def repeat_command(plan: Plan, output: str) -> str:
    """Return the command line that repeats every decision of the manifest, except trust in code; of a module in memory
    the call.
    """
    if plan.source.startswith(IN_MEMORY):
        return _call(plan, output)
    trust = ["--trust-code"] if plan.trust_code else []
    words = [plan.source, "--plan", f"{output}/manifest.json", *trust, "--output", output]
    return shlex.join(["infer", "optimize", *words])
