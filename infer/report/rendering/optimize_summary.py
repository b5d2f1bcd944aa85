"""The end of `infer optimize`: verdict, five lines of figures, and what to do next, in 24 lines of 100 columns at most,
more where a path is so long.

`infer report` shows the rest: every layer, limit, backend and finding.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console

from ...results import IN_FLOAT
from .. import search_tables
from ..document import Report
from ..sections import timed_rows
from . import formatting
from .text_layout import WIDTH, command_lines, show_lines, width_of, wrap

HEIGHT = 24
LABEL = 10  # columns of the names at the left
REPORT_HAS = "  # every layer, limit and backend; as a page: report.html in it"
MOST = 3  # lines of a sentence; what is longer ends in "…"
NAMES = {
    "top1": "top-1 agreement",
    "relative_error": "relative error",
    "relative_error_max": "of the worst row",
    "perplexity_change": "perplexity change",
}
# What matters most first.
METRICS = ("perplexity_change", "top1", "relative_error", "relative_error_max", "cosine", "kl", "exact")


def render_screen(report: Report, console: Console, path: Path) -> None:
    """Print the lines of `screen`; on a terminal in color."""
    lines = screen(report, path, width=min(WIDTH, width_of(console)))
    show_lines(console, lines[:1], style="bold green" if report.passed else "bold red")
    show_lines(console, lines[1:])


def screen(report: Report, path: Path, *, width: int = WIDTH) -> list[str]:
    """Lines of the verdict, of the figures, and of the commands to run next, which are whole whatever they take."""
    passed = "passed" if report.passed else "FAILED"
    half = f" in {report.plan.dtype}" if report.plan.dtype in ("bfloat16", "float16") else ""
    title = f"{report.name}: {passed}. {report.backend} {_format(report)}{half}, {report.device}"
    room = width - LABEL
    last = [line for name, command in _next(report, path) for line in _command(name, command, width)]
    if len(last[0]) > LABEL and cell_len(last[0] + REPORT_HAS) <= width:
        last[0] += REPORT_HAS
    texts = [(name, wrap(text, room)) for name, text in _figures(report, room)]
    most = 1 if len(last) + 2 * len(texts) > HEIGHT - 6 else 2
    figures = [line for name, lines in texts for line in _beside(name, _most(lines, most))]
    spare = max(1, HEIGHT - 3 - len(figures) - len(last))
    sentences = [f"  {line}" for text in _sentences(report) for line in _most(wrap(text, width - 2), MOST)]
    return [*_most(wrap(title, width), 1), *_most(sentences, spare), "", *figures, "", *last]


def _format(report: Report) -> str:
    """Name the format asked for, those that the layers have where none of them has it, or what chose their mixture."""
    plan, asked = report.plan, report.plan.quant
    if plan.bits is not None:
        return f"mixed formats (--bits {plan.bits:g})"
    if plan.max_drop is not None:
        return f"mixed formats (--max-drop {plan.max_drop:g})"
    formats = {layer.format.partition(":")[0] for layer in report.layers} - {"float"}
    if asked in ("none", "keep") or not formats or plan.quant_name in formats:
        return asked
    return f"{', '.join(sorted(formats))} ({asked} was asked for)"


def _sentences(report: Report) -> list[str]:
    """Write the verdict: why it failed, what the artifact can't do, and its speed."""
    speed = [line for line in report.verdict if line not in report.limitations][:1]
    return [*([report.failure] if report.failure else []), *report.limitations, *speed]


def _figures(report: Report, width: int) -> Iterator[tuple[str, str]]:
    """Yield the lines of figures as (name, text); a text has at most `width` columns."""
    before = f", was {formatting.size(report.original_size)}" if report.original_size else ""
    ratio = formatting.smaller(report.original_size, report.size)
    rows = formatting.with_rows(report.size, report.rows_size)
    yield "size", f"{formatting.size(report.size)}{before}" + (f" ({ratio})" if ratio else "") + rows
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
    yield "report", f"infer report {quoted}"
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
    text, whole = "", 0.0
    for metric in METRICS:
        rows = [row for row in report.fidelity if row.metric == metric]
        if not rows:
            continue
        row = max(rows, key=lambda r: (r.used or 0.0, float(r.value or 0)))
        if metric == "relative_error":
            whole = float(row.value or 0.0)
        elif metric == "relative_error_max" and float(row.value or 0.0) <= whole:
            continue  # the error of all is that of a batch size or of a place with larger ones
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
    decoded = next((f.value for f in report.findings if f.what == f"{report.backend} {IN_FLOAT}"), 0)
    how = f"{decoded} compute in float, decoded when it opens" if decoded else ""
    return "; ".join(text for text in (formats, report.quantized, how) if text)


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


def _beside(name: str, lines: Sequence[str]) -> list[str]:
    return [f"{name if not number else '':<{LABEL}}{line}" for number, line in enumerate(lines)]


def _command(name: str, command: str, width: int) -> list[str]:
    """Write a command beside its name; one that does not fit below it, from the first column on, to be copied."""
    if cell_len(command) <= width - LABEL:
        return _beside(name, [command])
    return [name, *command_lines(command, width)]


def _most(lines: list[str], most: int) -> list[str]:
    """Keep so many lines; where some are left out, the last one ends in "…"."""
    return lines if len(lines) <= most else [*lines[: most - 1], f"{lines[most - 1][:-2].rstrip()} …"]
