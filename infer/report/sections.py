"""The report as a list of sections: sentences, figures and tables, which the terminal and the HTML page both render."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from ..llm.step.full_sequence_runner import CONTEXT
from ..spec import Finding, LayerChoice
from . import search_tables
from .document import FidelityRow, LatencyRow, Report
from .measurements import step_breakdown
from .rendering import formatting
from .rendering.text_layout import Column, Table

VERDICTS = {True: "within", False: "outside", None: ""}  # of a metric and its limit
# Subject of a metric that was taken at one size of an axis: `logits at batch 3`, of all outputs `batch 3`.
_AT_SIZE = re.compile(r"(?:(?P<output>.+) at )?(?P<size>\w+ \d+)")
LAYER_COLUMNS = (
    *(Column("layer"), Column("format")),
    *(Column("bits", right=True), Column("weight error", right=True), Column("effect", right=True)),
    Column("why"),
)
BRIEF, BRIEFEST = 12, 3  # layers, where measurements or a budget chose their formats and where they did not
_WHY = (Column("what"), Column("value"), Column("why"))


@dataclass(frozen=True)
class Section:
    """Contents in the order in which they are shown. `chart`: the picture that the page draws above the tables."""

    title: str
    lines: Sequence[str] = ()
    pairs: Sequence[tuple[str, str]] = ()
    tables: Sequence[Table] = ()
    commands: Sequence[tuple[str, str]] = ()  # label and command line
    chart: Literal["", "search", "latency", "fidelity", "memory"] = ""


def sections(report: Report, *, brief: bool = False) -> Iterator[Section]:
    """Yield the sections that have contents; with `brief`, of the layers only those that cost most."""
    if report.search is not None:
        yield _search(report.search)
    if tables := list(_decisions(report)):
        yield Section("Decisions", tables=tables)
    yield Section("Card", pairs=_card(report))
    if report.latency:
        yield _latency(report)
    if report.fidelity:
        caption = f"Against the float original; limits of {report.precision}"
        columns = (
            *(Column("what"), Column("value", right=True), Column("limit", right=True)),
            *(Column("verdict", drop=1), Column("meaning")),
        )
        rows = [_fidelity_cells(row) for row in worst_sizes(report)]
        yield Section("Fidelity", tables=[Table(columns, rows, caption)], chart="fidelity")
    if report.layers:
        yield _layers(report, brief=brief)
    if report.memory is not None:
        figures = Column("what"), Column("value", right=True), Column("why")
        caption = "A fresh process that opens and runs it"
        table = Table(figures, list(map(_cells, report.memory.findings())), caption)
        yield Section("Memory", tables=[table], chart="memory")
    yield _graph(report)
    shown = ("backend", "layer", "compare", "memory", "ceiling", step_breakdown.STAGE)  # by other tables
    if rows := [
        _cells(finding, f"{finding.stage}: ") for finding in report.findings if finding.stage not in shown
    ]:
        yield Section("Found on the way", tables=[Table(_WHY, rows, "In the order in which it was found")])
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    origin = [("made with", report.made_with), *report.machine.items(), ("versions", versions)]
    yield Section("Make it again", pairs=origin, commands=[("", report.command)])


def _cells(finding: Finding, before: str = "") -> tuple[str, str, str]:
    return before + finding.what, formatting.number(finding.value, finding.unit), finding.why


def _search(record: search_tables.SearchRecord) -> Section:
    budgets = ", ".join(search_tables.budget_texts(record)) or "none"
    lines = [f"{search_tables.summary(record)}. Budgets: {budgets}; for {record.budgets.aim}."]
    lines += [f"Chosen: {record.why}."] if record.why else []
    table = Table(search_tables.COLUMNS, search_tables.rows(record), search_tables.CAPTION)
    commands = [("this search", record.command), *search_tables.commands(record)]
    return Section("Search", lines, tables=[table], commands=commands, chart="search")


def _decisions(report: Report) -> Iterator[Table]:
    if report.tried:
        columns = Column("backend"), Column("outcome"), Column("time", right=True), Column("why")
        rows = [(row.name, row.outcome, formatting.seconds(row.seconds), row.why) for row in report.tried]
        yield Table(columns, rows, "Tried and refused")
    if report.choices:
        chosen = [(c.what, c.asked, c.value, c.reason) for c in report.choices]
        yield Table(tuple(map(Column, ("what", "asked", "taken", "why"))), chosen, "Chosen")


def _card(report: Report) -> list[tuple[str, str]]:
    """Return the reference figures: sizes, memory bandwidth, roofline ceiling."""
    memory, ceiling = report.memory, report.ceiling
    before = f", from {formatting.size(report.original_size)}" if report.original_size else ""
    beside = formatting.with_rows(report.size, report.rows_size)
    rows = [("artifact", f"{formatting.size(report.size)}{before}{beside}")]
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


def _latency(report: Report) -> Section:
    """Show paired times by batch size: of a language model, sequences that each decode one token."""
    title = f"Latency{timed_rows(report, ' on rows of ')}"
    if report.decodes:
        title = f"Decode step, {CONTEXT} tokens in the cache"
    per_second = "tokens/s" if report.decodes else "rows/s"
    names = {
        "batch": 0,
        "p50": 0,
        "p90": 3,
        "p99": 0,
        per_second: 1,
        "of ceiling": 2,
        "baseline": 0,
        "ratio [95 %]": 4,
    }
    columns = *(Column(name, right=True, drop=drop) for name, drop in names.items()), Column("verdict")
    caption = f"Interleaved with {report.baseline}; ratio: this artifact's time over that form's"
    table = Table(columns, list(map(_latency_cells, report.latency)), caption)
    return Section(title, tables=[table], chart="latency")


def timed_rows(report: Report, before: str) -> str:
    """Name the lengths of the rows that were timed after `before`; "" for a model without an attention mask."""
    lengths = [length for row in report.latency for length in row.lengths or ()]
    if not lengths:
        return ""
    low, high = min(lengths), max(lengths)
    return f"{before}{low if low == high else f'{low} to {high}'} token{'s' * (high > 1)}"


def _latency_cells(row: LatencyRow) -> tuple[str, ...]:
    pair, ours = row.pair, row.ours
    return (
        str(row.batch),
        *(formatting.seconds(seconds) for seconds in (ours.p50, ours.p90, ours.p99)),
        f"{row.per_second:,.0f}" if row.per_second >= 10 else f"{row.per_second:.2f}",
        formatting.of_ceiling(row.of_ceiling, in_cache=row.in_cache),
        formatting.seconds(row.baseline.p50),
        f"{pair.ratio:.3f} [{pair.low:.3f}, {pair.high:.3f}]",
        formatting.speed(pair),
    )


def _fidelity_cells(row: FidelityRow) -> tuple[str, ...]:
    bound = "" if row.limit is None else f"{'≤' if row.larger_is_worse else '≥'} {row.limit:g}"
    return row.what, formatting.number(row.value, row.unit), bound, VERDICTS[row.ok], row.why


def worst_sizes(report: Report) -> Iterator[FidelityRow]:
    """Yield the fidelity rows; of those that differ only in the size at which they were compared, the worst one."""
    by_metric: dict[tuple[str, str], list[tuple[str, FidelityRow]]] = {}
    for row in report.fidelity:
        if (at_size := _AT_SIZE.fullmatch(row.subject)) and isinstance(row.value, int | float):
            by_metric.setdefault((at_size["output"] or "", row.metric), []).append((at_size["size"], row))
        else:
            yield row
    for (output, metric), sizes in by_metric.items():
        size, worst = max(sizes, key=lambda one: _badness(one[1]))
        why = f"worst of {len(sizes)} sizes: {size}" if len(sizes) > 1 else f"at {size}"
        what = f"sizes: {output}.{metric}" if output else f"sizes: {metric}"
        yield msgspec.structs.replace(worst, what=what, why=f"{why}; {worst.why}" if worst.why else why)


def _badness(row: FidelityRow) -> tuple[bool, float]:
    """Order rows of one metric: what is outside its limit last, then by what is used of it, or by the value."""
    value = row.value if isinstance(row.value, int | float) else 0.0
    used = row.used if row.used is not None else (value if row.larger_is_worse else -value)
    return row.ok is False, math.inf if math.isnan(used) else used


def _layers(report: Report, *, brief: bool) -> Section:
    shown = most_costly(report) if brief else report.layers
    caption = layer_counts(report.layers)
    if any(layer.effect for layer in shown):
        caption += "; effect: what this format of this layer alone does to the output"
    if len(shown) < len(report.layers):
        caption += "; those that cost most, all in report.html"
    rows = [layer_cells(layer, effects=not brief) for layer in shown]
    used = [index for index in range(len(LAYER_COLUMNS)) if any(row[index] for row in rows)]
    columns = [LAYER_COLUMNS[index] for index in used]
    return Section(
        "Layers", tables=[Table(columns, [[row[index] for index in used] for row in rows], caption)]
    )


def layer_cells(layer: LayerChoice, *, effects: bool = True) -> tuple[str, ...]:
    """Return the texts under `LAYER_COLUMNS`; effects of the chosen format and of the others are those of one layer."""
    error = "" if layer.weight_error is None else f"{layer.weight_error:.4f}"
    effect = layer.effect.get(layer.format)
    others = ", ".join(
        f"{name} {value:.2g}" for name, value in layer.effect.items() if name != layer.format and value
    )
    why = "; ".join(part for part in (layer.why, f"alone: {others}" if others and effects else "") if part)
    return (
        layer.name,
        layer.format,
        f"{layer.bits:.2f}",
        error,
        "" if effect is None else f"{effect:.3g}",
        why,
    )


def _has_chosen_formats(report: Report) -> bool:
    """Return True when measurements or a budget chose the formats of layers."""
    return any(
        layer.effect or (layer.by and layer.format not in ("float", report.plan.quant))
        for layer in report.layers
    )


def most_costly(report: Report) -> list[LayerChoice]:
    """Return a few layers in order: those with the largest effect, then not in the format asked, then weight error."""
    keep = BRIEF if _has_chosen_formats(report) else BRIEFEST

    def weight(layer: LayerChoice) -> tuple[float, bool, float]:
        error = layer.weight_error
        left = error is not None and layer.format != report.plan.quant
        return layer.effect.get(layer.format, 0.0), left, error or 0.0

    chosen = {layer.name for layer in sorted(report.layers, key=weight, reverse=True)[:keep]}
    return [layer for layer in report.layers if layer.name in chosen]


def layer_counts(layers: Sequence[LayerChoice]) -> str:
    """Count layers by format: `31 nf4, 20 int8, 5 float`."""
    return ", ".join(
        f"{count} {format}" for format, count in Counter(layer.format for layer in layers).most_common()
    )


def _graph(report: Report) -> Section:
    sides = ("input", report.inputs), ("output", report.outputs)
    rows = [
        (side, spec.name, spec.dtype, f"[{', '.join(map(str, spec.shape))}]")
        for side, specs in sides
        for spec in specs
    ]
    columns = tuple(map(Column, ("side", "name", "dtype", "shape")))
    return Section("Inputs and outputs", tables=[Table(columns, rows, f"Task: {report.task}")])
