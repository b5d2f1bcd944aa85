"""The report as one HTML file: no script, no reference to anything outside it, every string escaped.

Bars are inline SVG whose widths are percents, so that they stretch with the page and the text around does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from ...latency import Latency
from ..document import FidelityRow, LatencyRow, Report
from ..sections import VERDICTS, Section, sections, worst_sizes
from . import formatting
from .page import CSS, cell_html, number_class, swatch, words_html
from .text_layout import Table

_KINDS = {VERDICTS[True]: "ok", VERDICTS[False]: "over"}


def render_html(report: Report) -> str:
    """Render the whole page."""
    body = "\n".join([_header(report), *(_section(report, section) for section in sections(report))])
    style = CSS
    if report.search is not None:
        from .. import search_page

        style += search_page.CSS
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(report.name)}: {escape(report.headline)}</title>\n"
        f"<style>{style}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _header(report: Report) -> str:
    kind = "passed" if report.passed else "failed"
    lines = [*report.verdict, *([report.failure] if report.failure else [])]
    paragraphs = "".join(f"<p>{words_html(line)}</p>" for line in lines)
    headline = words_html(
        report.headline.replace(" %", "\u00a0%")
    )  # the sign stays on the line of its number
    soft = f"{report.backend} {report.precision}, {report.device}"
    return (
        f'<header class="{kind}"><h1>{words_html(report.name)} <span class="soft">{words_html(soft)}</span></h1>'
        f'<p class="headline">{headline}</p>{paragraphs}</header>'
    )


def _section(report: Report, section: Section) -> str:
    """Render sentences, chart, tables, figures and commands; a search draws its own table, which can be sorted."""
    parts = [
        f"<h2>{words_html(section.title)}</h2>",
        *(f"<p>{words_html(line)}</p>" for line in section.lines),
    ]
    parts.append(_CHARTS[section.chart](report) if section.chart else "")
    parts += [] if section.chart == "search" else map(_table, section.tables)
    if section.pairs:
        rows = (f"<dt>{escape(name)}</dt><dd>{words_html(value)}</dd>" for name, value in section.pairs)
        parts.append(f"<dl>{''.join(rows)}</dl>")
    if section.commands:
        listing = "\n".join(
            f"# {label}\n{command}" if label else command for label, command in section.commands
        )
        shown = f"<pre>{escape(listing)}</pre>"
        several = f"<details><summary>The command that makes each</summary>{shown}</details>"
        parts.append(several if len(section.commands) > 1 else shown)
    return f"<section>{''.join(parts)}</section>"


def _search(report: Report) -> str:
    record = report.search
    if record is None:
        return ""
    from .. import search_page

    return search_page.plot(record) + search_page.trials_table(record)


def _latency(report: Report) -> str:
    bars = "".join(_latency_bars(row, report.baseline) for row in report.latency)
    key = "Bars end at the median; the thin line runs from the fastest call to the 90th percentile"
    if any(row.floor is not None for row in report.latency):
        key += "; the orange tick is the least time that this machine's memory and arithmetic allow"
    return f'{bars}<p class="soft">{key}.</p>'


def _fidelity(report: Report) -> str:
    bars = "".join(_fidelity_bar(row) for row in worst_sizes(report) if row.used is not None)
    key = f"Share of what the limits of {report.precision} allow; the tick is the limit."
    shown = f'<figure><figcaption>{escape(key)}</figcaption><div class="bars">{bars}</div></figure>'
    return shown if bars else ""


def _memory(report: Report) -> str:
    memory = report.memory
    if memory is None or memory.runtime is None or memory.opened is None or memory.run is None:
        return ""
    parts = (
        ("runtime", memory.runtime),
        ("weights and code", memory.opened),
        ("activations and workspace", memory.run),
    )
    return _stacked([(words, float(value)) for words, value in parts])


_CHARTS: dict[str, Callable[[Report], str]] = {
    "search": _search,
    "latency": _latency,
    "fidelity": _fidelity,
    "memory": _memory,
}


def _table(table: Table) -> str:
    """Render a table whose cells carry their column's name (data-head), for narrow pages."""
    heads = (f'<th scope="col"{number_class(column)}>{escape(column.name)}</th>' for column in table.columns)
    rows = (f"<tr>{''.join(_cells(table, row))}</tr>" for row in table.rows)
    head = f"<caption>{words_html(table.caption)}</caption><thead><tr>{''.join(heads)}</tr></thead>"
    return f"<table>{head}<tbody>{''.join(rows)}</tbody></table>"


def _cells(table: Table, row: Sequence[str]) -> Sequence[str]:
    cells = []
    for column, cell in zip(table.columns, row, strict=True):
        kind = (
            f' class="{_KINDS[cell]}"'
            if column.name == "verdict" and cell in _KINDS
            else number_class(column)
        )
        cells.append(
            f'<td{kind} data-head="{escape(column.name)}">{cell_html(cell, right=column.right)}</td>'
        )
    return cells


def _latency_bars(row: LatencyRow, baseline: str) -> str:
    """Two bars at p50 with whiskers from the fastest call to p90; a tick where the ceiling is."""
    longest = max(row.ours.p90, row.baseline.p90, row.floor or 0.0) or 1.0
    bars = [
        _bar("this artifact", row.ours, longest, "ours", row.floor),
        _bar(baseline, row.baseline, longest, "base", None),
    ]
    title = f"batch {row.batch}: {formatting.speed(row.pair)}"
    return f'<figure><figcaption>{escape(title)}</figcaption><div class="bars">{"".join(bars)}</div></figure>'


def _bar(label: str, taken: Latency, longest: float, kind: str, floor: float | None) -> str:
    p50, low, high = (_percent(value / longest) for value in (taken.p50, taken.min, taken.p90))
    words = f"{label}: median {formatting.seconds(taken.p50)}, 90 % below {formatting.seconds(taken.p90)}"
    shapes = [
        f'<rect class="{kind}" x="0" y="3" width="{p50}" height="12" rx="2"/>',
        f'<line class="whisker" x1="{low}" x2="{high}" y1="9" y2="9"/>',
        *(f'<line class="whisker" x1="{x}" x2="{x}" y1="5" y2="13"/>' for x in (low, high)),
    ]
    if floor is not None:
        x = _percent(floor / longest)
        shapes.append(f'<line class="floor" x1="{x}" x2="{x}" y1="0" y2="18"/>')
    return _row(label, words, shapes, formatting.seconds(taken.p50))


def _fidelity_bar(row: FidelityRow) -> str:
    """Draw the share of the limit that is used; the tick is the limit, at four fifths of the width."""
    used = row.used or 0.0
    kind = "good" if row.ok else "bad"
    words = f"{row.what}: {formatting.share(used)} of what the limit allows"
    shapes = [
        f'<rect class="{kind}" x="0" y="3" width="{_percent(0.8 * used)}" height="12" rx="2"/>',
        '<line class="limit" x1="80%" x2="80%" y1="0" y2="18"/>',
    ]
    return _row(row.what, words, shapes, f"{100 * used:,.0f} %")


def _row(label: str, words: str, shapes: Sequence[str], value: str) -> str:
    svg = f'<svg role="img" aria-label="{escape(words)}" height="18">{"".join(shapes)}</svg>'
    return f'<div class="bar"><span>{words_html(label)}</span>{svg}<b>{escape(value)}</b></div>'


def _stacked(parts: Sequence[tuple[str, float]]) -> str:
    """One bar of several parts and a legend with their sizes; parts are (name, bytes)."""
    whole = sum(value for _, value in parts) or 1.0
    shapes, legend, at = [], [], 0.0
    for index, (name, value) in enumerate(parts):
        x, width = _percent(at / whole), _percent(value / whole)
        shapes.append(f'<rect class="part{index}" x="{x}" y="0" width="{width}" height="26"/>')
        legend.append(f"<li>{swatch(f'part{index}')} {escape(name)} <b>{formatting.size(value)}</b></li>")
        at += value
    words = ", ".join(f"{name} {formatting.size(value)}" for name, value in parts)
    svg = f'<svg class="stack" role="img" aria-label="{escape(words)}" height="26">{"".join(shapes)}</svg>'
    return f'<figure>{svg}<ul class="legend">{"".join(legend)}</ul></figure>'


def _percent(share: float) -> str:
    return f"{100 * min(max(share, 0.0), 1.0):.2f}%"
