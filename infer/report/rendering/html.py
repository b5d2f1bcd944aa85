"""The report as one HTML file: no script, no reference to anything outside it, every string escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .. import layers, search_plot, search_tables, search_trials
from ..document import Report
from . import charts, formatting, terminal
from .style import CSS


def render_html(report: Report) -> str:
    """Render the whole page."""
    sections = [
        _header(report),
        _search(report),
        _decisions(report),
        _section("Card", _pairs(terminal.card(report))),
        _latency(report),
        _fidelity(report),
        _layers(report),
        _memory(report),
        _graph(report),
        _found(report),
        _repeat(report),
    ]
    body = "\n".join(filter(None, sections))
    style = CSS if report.search is None else CSS + search_plot.CSS + search_trials.CSS
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(report.name)}: {escape(report.headline)}</title>\n"
        f"<style>{style}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _header(report: Report) -> str:
    kind = "passed" if report.passed else "failed"
    lines = [*report.verdict, *([report.failure] if report.failure else [])]
    said = "".join(f"<p>{escape(line)}</p>" for line in lines)
    headline = escape(report.headline.replace(" %", "\u00a0%"))  # the sign stays on the line of its number
    return (
        f'<header class="{kind}"><h1>{escape(report.name)} <span class="soft">{escape(report.backend)} '
        f"{escape(report.precision)}, {escape(report.device)}</span></h1>"
        f'<p class="headline">{headline}</p>{said}</header>'
    )


def _search(report: Report) -> str:
    """Show the plot, the trials and their commands of the search that this artifact won."""
    record = report.search
    if record is None:
        return ""
    each = [f'<span class="whole">{escape(text)}</span>' for text in search_tables.budget_texts(record)]
    budgets = f"Budgets: {', '.join(each) or 'none'}; for {record.budgets.aim}."
    said = f"<p>{escape(search_tables.summary(record))}. {budgets}</p>"
    said += f"<p>Chosen: {escape(record.why)}.</p>" if record.why else ""
    table = search_trials.trials_table(record)
    made = "\n".join(f"# {label}\n{command}" for label, command in search_tables.commands(record))
    again = f"<pre># this search\n{escape(record.command)}\n{escape(made)}</pre>"
    shown = f"<details><summary>The command that makes each</summary>{again}</details>"
    return _section("Search", said + search_plot.plot(record) + table + shown)


def _latency(report: Report) -> str:
    if not report.latency:
        return ""
    bars = "".join(charts.latency_bars(row, report.baseline) for row in report.latency)
    key = "Bars end at the median; the thin line runs from the fastest call to the 90th percentile"
    if any(row.floor is not None for row in report.latency):
        key += "; the orange tick is the least time that this machine's memory and arithmetic allow"
    rows = [terminal.latency_cells(row) for row in report.latency]
    caption = f"Interleaved with {report.baseline}; ratio: this artifact's time over that form's"
    table = _table(caption, terminal.latency_heads(report), rows, right=range(8))
    return _section(terminal.latency_title(report), f'{bars}<p class="soft">{key}.</p>{table}')


def _fidelity(report: Report) -> str:
    if not report.fidelity:
        return ""
    judged = [row for row in report.fidelity if row.used is not None]
    bars = "".join(charts.fidelity_bar(row) for row in judged)
    key = f"Share of what the limits of {report.precision} allow; the tick is the limit."
    shown = (
        f'<figure><figcaption>{escape(key)}</figcaption><div class="bars">{bars}</div></figure>'
        if judged
        else ""
    )
    rows, kinds = [], []
    for row in report.fidelity:
        what, value, bound, meaning = terminal.fidelity_cells(row)
        verdict = "" if row.ok is None else "within" if row.ok else "outside"
        rows.append((what, value, bound, verdict, meaning))
        kinds.append({3: "ok" if row.ok else "over"} if row.ok is not None else {})
    heads = ("what", "value", "limit", "verdict", "meaning")
    return _section(
        "Fidelity", shown + _table("Against the float original", heads, rows, right=(1, 2), kinds=kinds)
    )


def _layers(report: Report) -> str:
    if not report.layers:
        return ""
    rows = [layers.cells(layer) for layer in report.layers]
    caption = (
        f"{layers.counts(report.layers)}; effect: what this format of this layer alone does to the output"
    )
    return _section("Layers", _table(caption, layers.HEADS, rows, right=(2, 3, 4)))


def _memory(report: Report) -> str:
    memory = report.memory
    if memory is None:
        return ""
    parts = (
        ("runtime", memory.runtime),
        ("weights and code", memory.opened),
        ("activations and workspace", memory.run),
    )
    known = [(words, float(value)) for words, value in parts if value is not None]
    chart = charts.stacked(known) if len(known) == len(parts) else ""
    rows = [(f.what, formatting.number(f.value, f.unit), f.why) for f in memory.findings()]
    return _section(
        "Memory",
        chart + _table("A fresh process that opens and runs it", ("what", "value", "why"), rows, (1,)),
    )


def _decisions(report: Report) -> str:
    tried = [(row.name, row.outcome, formatting.seconds(row.seconds), row.why) for row in report.tried]
    chosen = [(c.what, c.asked, c.value, c.reason) for c in report.choices]
    tables = [
        _table("Tried and refused", ("backend", "outcome", "time", "why"), tried, (2,)) if tried else "",
        _table("Chosen", ("what", "asked", "taken", "why"), chosen) if chosen else "",
    ]
    return _section("Decisions", "".join(tables)) if any(tables) else ""


def _found(report: Report) -> str:
    rows = [
        (f.stage, f.what, formatting.number(f.value, f.unit), f.why) for f in terminal.other_findings(report)
    ]
    table = _table("In the order in which it was found", ("stage", "what", "value", "why"), rows)
    return _section("Found on the way", table) if rows else ""


def _graph(report: Report) -> str:
    rows = [("input", s.name, s.dtype, _shape(s.shape)) for s in report.inputs]
    rows += [("output", s.name, s.dtype, _shape(s.shape)) for s in report.outputs]
    return _section(
        "Inputs and outputs", _table(f"Task: {report.task}", ("side", "name", "dtype", "shape"), rows)
    )


def _shape(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _repeat(report: Report) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    made = [("made with", report.made_with), *report.machine.items(), ("versions", versions)]
    return _section("Make it again", f"<pre>{escape(report.command)}</pre><br>{_pairs(made)}")


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _pairs(rows: Sequence[tuple[str, str]]) -> str:
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(value)}</dd>' for name, value in rows)}</dl>"


def _table(
    caption: str,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[int] = (),
    kinds: Sequence[dict[int, str]] = (),
) -> str:
    """Render a table whose cells carry their column's name (data-head), for narrow pages."""
    top = "".join(f'<th scope="col"{_kind(i, right, {})}>{escape(head)}</th>' for i, head in enumerate(heads))
    body = []
    for number, row in enumerate(rows):
        own = kinds[number] if kinds else {}
        cells = (
            f'<td{_kind(i, right, own)} data-head="{escape(heads[i])}">{escape(cell)}</td>'
            for i, cell in enumerate(row)
        )
        body.append(f"<tr>{''.join(cells)}</tr>")
    head = f"<caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead>"
    return f"<table>{head}<tbody>{''.join(body)}</tbody></table>"


def _kind(index: int, right: Sequence[int], own: dict[int, str]) -> str:
    kind = own.get(index) or ("num" if index in right else "key" if index == 0 else "")
    return f' class="{kind}"' if kind else ""
