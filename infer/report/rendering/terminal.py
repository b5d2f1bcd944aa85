"""The report on a terminal: verdict, card, tables. Elsewhere it is plain text of at most 100 columns."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...llm.step.full_sequence_runner import CONTEXT
from ...spec import Finding
from .. import layers, search_tables
from ..document import FidelityRow, LatencyRow, Report
from ..measurements import step_breakdown
from . import formatting

WIDTH = 100


def render_terminal(report: Report, console: Console) -> None:
    """Print the report as wide as the terminal, at most 100 columns; texts are not interpreted as markup."""
    if console.is_terminal:
        _render(report, console, min(console.width, WIDTH))
        return
    plain = Console(file=io.StringIO(), width=WIDTH, no_color=True)
    _render(report, plain, WIDTH)
    lines = cast(io.StringIO, plain.file).getvalue().splitlines()
    console.file.write("\n".join(line.rstrip() for line in lines) + "\n")


def _render(report: Report, console: Console, width: int) -> None:
    title = f"{report.name}  {report.backend} {report.precision}, {report.device}"
    console.print(Text(title, style="bold"), soft_wrap=True)
    console.print(Text(report.headline, style="bold green" if report.passed else "bold red"), width=width)
    for line in (*report.verdict, *([report.failure] if report.failure else [])):
        console.print(Text(line), width=width)
    for table in (*_search(report), *_decisions(report)):
        console.print(table, width=width)
    _lines(console, "Card", card(report), width)
    for table in _measurement_tables(report, narrow=width < 96):
        console.print(table, width=width)
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    _lines(
        console, "Made", [("with", report.made_with), ("on", _machine(report)), ("versions", versions)], width
    )
    for label, command in [] if report.search is None else search_tables.commands(report.search):
        console.print(Text(f"\n{label}:", style="dim"))
        console.print(Text(command), soft_wrap=True)
    console.print("\nagain:", highlight=False)
    console.print(Text(report.command), soft_wrap=True)


def _search(report: Report) -> Iterator[Table]:
    record = report.search
    if record is not None:
        budgets = ", ".join(search_tables.budget_texts(record)) or "no budget"
        title = f"Search: {search_tables.summary(record)}; {budgets}; for {record.budgets.aim}"
        title += f"\nchosen: {record.why}" if record.why else ""
        heads = tuple(head for head in search_tables.HEADS if head != "per second")
        rows = [tuple(cell for i, cell in enumerate(row) if i != 3) for row in search_tables.rows(record)]
        yield _table(title, heads, rows, right=(2, 3, 4, 5))


def _decisions(report: Report) -> Iterator[Table]:
    tried = [(row.name, row.outcome, formatting.seconds(row.seconds), row.why) for row in report.tried]
    if tried:
        yield _table("Tried", ("backend", "outcome", "time", "why"), tried, right=(2,))
    if report.choices:
        chosen = [(c.what, c.asked, c.value, c.reason) for c in report.choices]
        yield _table("Chosen", ("what", "asked", "taken", "why"), chosen)


def _measurement_tables(report: Report, *, narrow: bool) -> Iterator[Table]:
    """Yield the tables of latency, fidelity, layers and memory that were measured."""
    if report.latency:
        yield _latency(report, narrow=narrow)
    if report.fidelity:
        yield _fidelity(report.fidelity)
    if layers.has_chosen_formats(report):
        shown = layers.most_costly(report.layers, report.plan.quant)
        rest = "" if len(shown) == len(report.layers) else "; those that cost most, all in report.html"
        rows = [layers.cells(layer, effects=False) for layer in shown]
        title = f"Layers: {layers.counts(report.layers)}{rest}"
        yield _table(title, layers.HEADS, rows, right=(2, 3, 4))
    if report.memory is not None:
        rows = [(f.what, formatting.number(f.value, f.unit), f.why) for f in report.memory.findings()]
        yield _table("Memory, of a fresh process", ("what", "value", "why"), rows, right=(1,))
    found = [
        (f"{f.stage}: {f.what}", formatting.number(f.value, f.unit), f.why) for f in other_findings(report)
    ]
    if rows := [*found, *([] if layers.has_chosen_formats(report) else worst_weights(report))]:
        yield _table("Found on the way", ("what", "value", "why"), rows)


def other_findings(report: Report) -> list[Finding]:
    """Select the findings that no other table shows."""
    shown = ("backend", "layer", "compare", "memory", "ceiling", step_breakdown.STAGE)
    return [finding for finding in report.findings if finding.stage not in shown]


def worst_weights(report: Report, *, keep: int = 3) -> list[tuple[str, str, str]]:
    """Show the layers with the largest weight error where the table of layers is not shown."""
    quantized = [layer for layer in report.layers if layer.weight_error is not None]
    ranked = sorted(quantized, key=lambda layer: -(layer.weight_error or 0.0))
    rows = [
        (f"layer: {layer.name}", formatting.number(layer.weight_error, "relative rms"), layer.format)
        for layer in ranked[:keep]
    ]
    if rest := len(ranked[keep:]):
        rows.append(("other layers", f"{rest} layers", "less weight error; in report.html"))
    return rows


def card(report: Report) -> list[tuple[str, str]]:
    """Render the reference figures: sizes, memory bandwidth, roofline ceiling."""
    memory, ceiling = report.memory, report.ceiling
    before = f", from {formatting.size(report.original_size)}" if report.original_size else ""
    rows = [("artifact", f"{formatting.size(report.size)}{before}")]
    if memory is not None and memory.weights is not None:
        rows.append(("weights", formatting.size(memory.weights) + _dtypes(memory.weights_by_dtype)))
    elif ceiling is not None:
        rows.append(("weights", formatting.size(ceiling.weight_bytes)))
    if ceiling is not None:
        bandwidth = formatting.number(ceiling.read_bandwidth, "B/s")
        rows.append(("bandwidth", f"{bandwidth} (measured, all threads)"))
        rows.append(("peak", f"{formatting.number(ceiling.multiply_peak, 'FLOP/s')} ({ceiling.peak_source})"))
    if report.cache is not None:
        per_token = formatting.size(report.cache.bytes_per_token)
        pages = "" if report.cache.page is None else f", pages of {report.cache.page} tokens"
        rows.append(("KV cache", f"{per_token} a token ({report.cache.dtype}{pages})"))
        if report.cache.state_bytes:
            rows.append(("state", f"{formatting.size(report.cache.state_bytes)} a sequence (float32)"))
    for row in report.latency:
        if row.floor is not None:
            what = "decode step" if report.decodes else "call"
            text = f"{formatting.seconds(row.floor)} a {what} at batch {row.batch}, {row.bound}-bound"
            text += ", in cache" if row.in_cache else ""
            rows.append(("ceiling", text))
    for step in report.steps:
        rows.append(("goes into", f"{step.shares} of a {step_breakdown.STAGE} at batch {step.batch}"))
    return rows


def _dtypes(sizes: Mapping[str, int]) -> str:
    each = ", ".join(f"{name} {formatting.size(size)}" for name, size in sizes.items())
    return f" ({each})" if each else ""


def latency_cells(row: LatencyRow) -> tuple[str, ...]:
    """batch, p50, p90, p99, rows (tokens) a second, of ceiling, baseline p50, ratio with interval, verdict."""
    pair, ours = row.pair, row.ours
    return (
        str(row.batch),
        formatting.seconds(ours.p50),
        formatting.seconds(ours.p90),
        formatting.seconds(ours.p99),
        f"{row.per_second:,.0f}" if row.per_second >= 10 else f"{row.per_second:.2f}",
        formatting.of_ceiling(row.of_ceiling, in_cache=row.in_cache),
        formatting.seconds(row.baseline.p50),
        f"{pair.ratio:.3f} [{pair.low:.3f}, {pair.high:.3f}]",
        formatting.speed(pair),
    )


def latency_heads(report: Report) -> tuple[str, ...]:
    per_second = "tokens/s" if report.decodes else "rows/s"
    return ("batch", "p50", "p90", "p99", per_second, "of ceiling", "baseline", "ratio [95 %]", "verdict")


def latency_title(report: Report) -> str:
    """Name the batch column: of a language model, sequences that each decode one token."""
    if report.decodes:
        return f"Decode step, {CONTEXT} tokens in the cache"
    return f"Latency{timed_rows(report, ' on rows of ')}"


def timed_rows(report: Report, before: str) -> str:
    """Name the lengths of the rows that were timed after `before`; "" for a model without an attention mask."""
    lengths = [length for row in report.latency for length in row.lengths or ()]
    if not lengths:
        return ""
    low, high = min(lengths), max(lengths)
    return f"{before}{low if low == high else f'{low} to {high}'} token{'s' * (high > 1)}"


def fidelity_cells(row: FidelityRow) -> tuple[str, str, str, str]:
    """Make rows of four columns: what, value, limit, meaning."""
    bound = "" if row.limit is None else f"{'≤' if row.larger_is_worse else '≥'} {row.limit:g}"
    return row.what, formatting.number(row.value, row.unit), bound, row.why


def _latency(report: Report, *, narrow: bool) -> Table:
    """Show batch, p50, p99, baseline and verdict where the terminal is narrow."""
    kept = (0, 1, 3, 6, 8) if narrow else tuple(range(9))
    rows = [[latency_cells(row)[i] for i in kept] for row in report.latency]
    heads = [latency_heads(report)[i] for i in kept]
    return _table(
        f"{latency_title(report)}, against {report.baseline}", heads, rows, right=range(len(kept) - 1)
    )


def _fidelity(rows: Sequence[FidelityRow]) -> Table:
    cells = [fidelity_cells(row) for row in rows]
    return _table(
        "Fidelity, against the float original", ("what", "value", "limit", "meaning"), cells, right=(1, 2)
    )


def _machine(report: Report) -> str:
    return ", ".join(value for key, value in report.machine.items() if key in ("cpu", "gpu", "arch", "isa"))


def _table(
    title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()
) -> Table:
    table = Table(title=f"\n{title}", title_justify="left", title_style="bold", box=None, pad_edge=False)
    last = len(heads) - 1
    for index, head in enumerate(heads):
        wraps = index == last
        table.add_column(
            head,
            justify="right" if index in right else "left",
            overflow="fold",
            no_wrap=not wraps,
            header_style="dim",
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _lines(console: Console, title: str, rows: Sequence[tuple[str, str]], width: int) -> None:
    table = Table(title=f"\n{title}", title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.show_header = False
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    console.print(table, width=width)
