"""The end of `infer optimize`: verdict, five lines of figures, and what to do next, in 24 lines of 100 columns at most.

`infer report` shows the rest: every layer, limit, backend and finding.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from .. import search_tables
from ..document import Report
from . import formatting
from .terminal import timed_rows

WIDTH, HEIGHT = 100, 24
LABEL = 10  # columns of the names at the left
MOST = 3  # lines of a sentence or path; what is longer ends in "…"
NAMES = {
    "top1": "top-1 agreement",
    "relative_error": "relative error",
    "perplexity_change": "perplexity change",
}
METRICS = ("perplexity_change", "top1", "relative_error", "cosine", "kl", "exact")  # what matters most first


def render_screen(report: Report, console: Console, path: Path) -> None:
    """Print the lines of `screen`; on a terminal in color."""
    width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    lines = screen(report, path, width=width)
    if not console.is_terminal:
        console.file.write("\n".join(lines) + "\n")
        return
    style = "bold green" if report.passed else "bold red"
    for number, line in enumerate(lines):
        console.print(Text(line, style=style if number == 0 else ""), soft_wrap=True)


def screen(report: Report, path: Path, *, width: int = WIDTH) -> list[str]:
    """Lines of the verdict, of the figures, and of the commands to run next."""
    passed = "passed" if report.passed else "FAILED"
    half = f" in {report.plan.dtype}" if report.plan.dtype in ("bfloat16", "float16") else ""
    title = f"{report.name}: {passed}. {report.backend} {report.plan.quant}{half}, {report.device}"
    figures = [_cut(f"{name:<{LABEL}}{text}", width) for name, text in _figures(report, width - LABEL)]
    last = [line for name, text in _next(report, path) for line in _wrapped(f"{name:<{LABEL}}", text, width)]
    sentences = [line for sentence in _sentences(report) for line in _wrapped("  ", sentence, width)]
    room = HEIGHT - 3 - len(figures) - len(last)
    return [*_wrapped("", title, width, most=1), *sentences[:room], "", *figures, "", *last]


def _sentences(report: Report) -> list[str]:
    """Write the verdict: why it failed, what the artifact can't do, and its speed."""
    speed = [line for line in report.verdict if line not in report.limitations][:1]
    return [*([report.failure] if report.failure else []), *report.limitations, *speed]


def _figures(report: Report, width: int) -> Iterator[tuple[str, str]]:
    """Yield the lines of figures as (name, text); a text has at most `width` columns."""
    before = f", was {formatting.size(report.original_size)}" if report.original_size else ""
    ratio = formatting.smaller(report.original_size, report.size)
    yield "size", f"{formatting.size(report.size)}{before}" + (f" ({ratio})" if ratio else "")
    if report.latency:
        yield "speed", _speed(report)
    if report.fidelity:
        yield "fidelity", _fidelity(report, width)
    if report.layers or report.quantized:
        yield "layers", _layers(report)
    if memory := _memory(report):
        yield "memory", memory
    if report.search is not None:
        yield "search", search_tables.summary(report.search)
        if report.search.why:
            yield "chosen", report.search.why
        if others := search_tables.front_line(report.search):
            yield "front", others


def _next(report: Report, path: Path) -> Iterator[tuple[str, str]]:
    """List the commands to run next, with the path quoted for a shell."""
    quoted = shlex.quote(str(path))
    yield "report", f"infer report {quoted} (every layer, limit and backend), {path / 'report.html'}"
    takes_sound = any(spec.name == "input_features" for spec in report.inputs)
    run = f"infer predict {quoted} {'SOUND.wav' if takes_sound else 'INPUT'}"
    if report.decodes and not takes_sound:
        run = f'infer generate {quoted} "Once upon a time"'
    yield "run", run
    yield "serve", f"infer serve {quoted}"


def _speed(report: Report) -> str:
    what = "decode step of " if report.decodes else "batch "
    parts = [
        f"{what}{row.batch} {formatting.seconds(row.ours.p50)} ({formatting.speed(row.pair)})"
        for row in report.latency
    ]
    return ", ".join(parts) + timed_rows(report, "; rows of ")


def _fidelity(report: Report, width: int) -> str:
    """List the metrics of the worst output with their limits, as many as fit, the most telling ones first."""
    text = ""
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
        longer = f"{text}{', ' if text else ''}{NAMES.get(metric, metric)} {value}{limit}"
        if text and len(longer) > width:
            break
        text = longer
    return text


def _layers(report: Report) -> str:
    """Count the layers of each format; say which share of the weights is quantized."""
    counts: dict[str, int] = {}
    for layer in report.layers:
        counts[layer.format] = counts.get(layer.format, 0) + 1
    formats = ", ".join(
        f"{count} {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1])
    )
    return "; ".join(text for text in (formats, report.quantized) if text)


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


def _cut(line: str, width: int) -> str:
    """Cut a line that is too long and end it with "…"."""
    return line if len(line) <= width else f"{line[: width - 2].rstrip()} …"


def _wrapped(label: str, text: str, width: int, *, most: int = MOST) -> list[str]:
    """Wrap `text` beside `label` to at most `most` lines; long paths are broken where they must be."""
    indent = " " * len(label)
    lines = textwrap.wrap(
        text, width, initial_indent=label, subsequent_indent=indent, max_lines=most, placeholder=" …"
    )
    return lines or [label.rstrip()]
