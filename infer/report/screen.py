"""The verdict of `infer optimize` on one screen: at most 24 lines of at most 100 columns, what matters most first.

`infer report` shows the rest: every layer, limit, backend and finding.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from . import formatting
from .document import Report

WIDTH, HEIGHT = 100, 24
LABEL = 10  # columns of the names at the left
MOST = 3  # lines of one row; what is longer ends in "…"
NAMES = {
    "top1": "top-1 agreement",
    "relative_error": "relative error",
    "perplexity_change": "perplexity change",
}
METRICS = ("perplexity_change", "top1", "cosine", "kl", "relative_error", "exact")


def render_screen(report: Report, console: Console, path: Path) -> None:
    """Print the verdict; on a terminal in color."""
    width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    lines = screen(report, path, width=width)
    if not console.is_terminal:
        console.file.write("\n".join(lines) + "\n")
        return
    style = "bold green" if report.passed else "bold red"
    for number, line in enumerate(lines):
        console.print(Text(line, style=style if number == 0 else ""), soft_wrap=True)


def screen(report: Report, path: Path, *, width: int = WIDTH) -> list[str]:
    """The lines: how it ended, the sentences of the verdict, the numbers, and where the report is."""
    passed = "passed" if report.passed else "FAILED"
    title = f"{report.name}: {passed}. {report.backend} {report.plan.quant}, {report.device}"
    sentences = [line for sentence in _sentences(report) for line in _wrapped("  ", sentence, width)]
    rows = [line for name, text in _rows(report) for line in _wrapped(f"{name:<{LABEL}}", text, width)]
    last = _wrapped(f"{'artifact':<{LABEL}}", str(path), width, most=2)
    last += _wrapped(
        f"{'report':<{LABEL}}", f"infer report {path} (all tables), {path / 'report.html'}", width
    )
    room = HEIGHT - 1 - len(last)
    sentences = sentences[: max(room - len(rows), room // 2)]
    return [*_wrapped("", title, width), *sentences, *rows[: room - len(sentences)], *last][:HEIGHT]


def _sentences(report: Report) -> Iterator[str]:
    """What people read first; those that limit what the artifact can do come before those that praise it."""
    lines = [*([report.failure] if report.failure else []), *report.verdict]
    yield from sorted(lines, key=lambda line: not line.startswith(("scores text only", "kept although")))


def _rows(report: Report) -> Iterator[tuple[str, str]]:
    before = f" from {formatting.size(report.original_size)}" if report.original_size else ""
    ratio = formatting.smaller(report.original_size, report.size)
    yield "size", f"{formatting.size(report.size)}{before}" + (f", {ratio}" if ratio else "")
    if report.latency:
        yield "speed", _speed(report)
    if report.fidelity:
        yield "fidelity", _fidelity(report)
    if layers := _layers(report):
        yield "layers", layers
    if tried := _tried(report):
        yield "backends", tried
    if memory := _memory(report):
        yield "memory", memory


def _speed(report: Report) -> str:
    what = "decode step of " if report.decodes else "batch "
    parts = [
        f"{what}{row.batch}: {formatting.seconds(row.ours.p50)}, {formatting.speed(row.pair)}"
        for row in report.latency
    ]
    return f"{'; '.join(parts)} (against {report.baseline})"


def _fidelity(report: Report) -> str:
    """The metrics that say most, of the worst output, with their limits."""
    parts = []
    for metric in METRICS:
        rows = [row for row in report.fidelity if row.metric == metric]
        if not rows:
            continue
        row = max(rows, key=lambda r: r.used or 0.0)
        limit = "" if row.limit is None else f" (limit {row.limit:g})"
        is_share = metric == "top1" and isinstance(row.value, float)
        value = (
            formatting.share(float(row.value or 0)) if is_share else formatting.number(row.value, row.unit)
        )
        parts.append(f"{NAMES.get(metric, metric)} {value}{limit}")
    return ", ".join(parts)


def _layers(report: Report) -> str:
    """Formats and how many layers have each; the first reasons of those that stay float."""
    if not report.layers:
        return ""
    counts: dict[str, int] = {}
    for layer in report.layers:
        counts[layer.format] = counts.get(layer.format, 0) + 1
    text = ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))
    kept = [layer for layer in report.layers if layer.format == "float"]
    reasons = "; ".join(f"{layer.name}: {layer.why}" for layer in kept[:2] if layer.why)
    more = f"; and {len(kept) - 2} more" if len(kept) > 2 else ""
    return f"{text}{f' ({reasons}{more})' if reasons else ''}"


def _tried(report: Report) -> str:
    return "; ".join(
        f"{row.name} {row.outcome}" + (f": {row.why}" if row.outcome == "refused" else _took(row.seconds))
        for row in report.tried
    )


def _took(seconds: float | None) -> str:
    return f" ({formatting.seconds(seconds)})" if seconds else ""


def _memory(report: Report) -> str:
    memory = report.memory
    if memory is None:
        return ""
    parts = (
        ("weights", None if memory.weights is None else formatting.size(memory.weights)),
        ("peak of a fresh process", None if memory.peak is None else formatting.size(memory.peak)),
        ("opens in", None if memory.open_seconds is None else formatting.seconds(memory.open_seconds)),
    )
    return ", ".join(f"{name} {value}" for name, value in parts if value is not None)


def _wrapped(label: str, text: str, width: int, *, most: int = MOST) -> list[str]:
    """`text` beside `label`, further lines indented, at most `most` of them. Paths are cut where they must be."""
    indent = " " * len(label)
    lines = textwrap.wrap(
        text, width, initial_indent=label, subsequent_indent=indent, max_lines=most, placeholder=" …"
    )
    return lines or [label.rstrip()]
