"""The report as one HTML file: no script, no reference to anything outside it, every string escaped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from ..document import Report
from ..sections import VERDICTS, Section, sections, worst_sizes
from . import charts
from .page import CSS, cell_html, words_html
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
    bars = "".join(charts.latency_bars(row, report.baseline) for row in report.latency)
    key = "Bars end at the median; the thin line runs from the fastest call to the 90th percentile"
    if any(row.floor is not None for row in report.latency):
        key += "; the orange tick is the least time that this machine's memory and arithmetic allow"
    return f'{bars}<p class="soft">{key}.</p>'


def _fidelity(report: Report) -> str:
    bars = "".join(charts.fidelity_bar(row) for row in worst_sizes(report) if row.used is not None)
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
    return charts.stacked([(words, float(value)) for words, value in parts])


_CHARTS: dict[str, Callable[[Report], str]] = {
    "search": _search,
    "latency": _latency,
    "fidelity": _fidelity,
    "memory": _memory,
}


def _table(table: Table) -> str:
    """Render a table whose cells carry their column's name (data-head), for narrow pages."""
    heads = (f'<th scope="col"{_kind(column.right)}>{escape(column.name)}</th>' for column in table.columns)
    rows = (f"<tr>{''.join(_cells(table, row))}</tr>" for row in table.rows)
    head = f"<caption>{words_html(table.caption)}</caption><thead><tr>{''.join(heads)}</tr></thead>"
    return f"<table>{head}<tbody>{''.join(rows)}</tbody></table>"


def _cells(table: Table, row: Sequence[str]) -> Sequence[str]:
    cells = []
    for column, cell in zip(table.columns, row, strict=True):
        kind = (
            f' class="{_KINDS[cell]}"' if column.name == "verdict" and cell in _KINDS else _kind(column.right)
        )
        cells.append(
            f'<td{kind} data-head="{escape(column.name)}">{cell_html(cell, right=column.right)}</td>'
        )
    return cells


def _kind(right: bool) -> str:
    return ' class="num"' if right else ""
