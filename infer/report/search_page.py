"""A search in the HTML report: its trials as a plot, and as a table that is filtered and sorted, without a script.

Latency goes across, quality up, memory is the size of a dot; hover and keyboard focus show a trial's figures. Check
boxes hide backends in both, by the style sheet alone. Each row of the table knows its place in every order; the radio
button that is checked says which one the style sheet takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from . import search_tables
from .rendering import formatting
from .rendering.page import cell_html, number_class, swatch
from .search_record import Measured, SearchRecord, TrialRecord

WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 74, 16, 46, 48  # margins
SMALLEST, LARGEST = 5.0, 18.0  # radius of a dot
ROOM = LARGEST + 5  # of a dot with its ring, between the first value and an axis
SERIES = 6  # colors; more backends share them

PLOT_CSS = """
.plot { max-width: 100%; height: auto; } .plot text { fill: var(--soft); font-size: 12px; }
.plot .axis { stroke: var(--line); stroke-width: 1; } .plot .budget { stroke: var(--bad); stroke-width: 1.5;
  stroke-dasharray: 5 4; }
.plot .front { fill: none; stroke: var(--soft); stroke-width: 1.5; }
.plot circle { fill-opacity: .55; stroke-width: 2; cursor: pointer; }
.plot .dot:focus { outline: none; } .plot .dot:focus circle, .plot .dot:hover circle { fill-opacity: .95;
  stroke: var(--ink); stroke-width: 3; }
.plot .dot .tip { visibility: hidden; } .plot .dot:hover .tip, .plot .dot:focus .tip { visibility: visible; }
.plot .tip text { fill: var(--ink); font-size: 13px; } .plot .tip rect { fill: var(--card); }
.plot .star { fill: none; stroke: var(--ink); stroke-width: 2; }
.s0 { fill: #1f6feb; stroke: #1f6feb; } .s1 { fill: #d97706; stroke: #d97706; }
.s2 { fill: #7c3aed; stroke: #7c3aed; } .s3 { fill: #1a7f37; stroke: #1a7f37; }
.s4 { fill: #c62878; stroke: #c62878; } .s5 { fill: #57606a; stroke: #57606a; }
.filters { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; border: 0; padding: 0; margin: 0 0 .4rem; }
.filters legend { padding: 0; color: var(--soft); font-size: .9rem; float: left; margin-right: 1rem; }
.filters label { display: flex; gap: .4rem; align-items: center; } .filters svg { width: 12px; }
"""

Value = Callable[[TrialRecord], float | None]
ORDERS = ("outcome", "latency", "per second", "memory", "size", "loss")

TABLE_CSS = (
    """
.sort { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; border: 0; padding: 0; margin: .8rem 0 0; }
.sort legend { padding: 0; color: var(--soft); font-size: .9rem; float: left; margin-right: 1rem; }
.sort label { display: flex; gap: .4rem; align-items: center; }
.trials thead tr { order: -1; } .trials caption { order: -2; }
@media (min-width: 42.01rem) {
  .trials { display: grid; grid-template-columns: auto minmax(7rem, auto) repeat(5, auto) minmax(12rem, 1fr); }
  .trials thead, .trials tbody { display: contents; } .trials caption { grid-column: 1 / -1; display: block; }
  .trials tr { display: grid; grid-column: 1 / -1; grid-template-columns: subgrid; }
  .trials th.num, .trials td.num { text-align: right; }
}
@media (max-width: 42rem) { .trials tbody { display: flex; flex-direction: column; } }
"""
    + "\n".join(
        f"section:has(#sort-{index}:checked) .trials tbody tr {{ order: var(--by-{index}); }}"
        for index in range(len(ORDERS))
    )
    + "\n"
)
CSS = PLOT_CSS + TABLE_CSS


@dataclass(frozen=True)
class Axis:
    """Values to places: logarithmic where all values are above 0 and span more than three times, else linear."""

    low: float
    high: float
    start: float
    stop: float
    log: bool

    @classmethod
    def over(cls, values: Sequence[float], start: float, stop: float) -> Axis:
        low, high = min(values), max(values)
        log = low > 0 and high > 3 * low
        if log:
            room = max(1.3, (high / low) ** 0.06)
            low, high = low / room, high * room
        else:
            room = (high - low) * 0.12 or abs(high) * 0.1 or 1.0
            low, high = (max(0.0, low - room) if low >= 0 else low - room), high + room
        return cls(low, high, start, stop, log)

    def place(self, value: float) -> float:
        if self.log:
            share = math.log(max(value, 1e-300) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + min(max(share, 0.0), 1.0) * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Return about five round values within the axis."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            span = self.high / self.low
            steps = (1,) if span > 300 else (1, 2, 5) if span > 12 else (1, 1.5, 2, 3, 4, 5, 6, 8)
            return [s * 10.0**p for p in powers for s in steps if self.low <= s * 10.0**p <= self.high]
        step = 10 ** math.floor(math.log10((self.high - self.low) / 3))
        step *= next(m for m in (1, 2, 5, 10) if (self.high - self.low) / (step * m) <= 6)
        first = math.ceil(self.low / step)
        return [i * step for i in range(first, math.floor(self.high / step) + 1)]


def plot(record: SearchRecord) -> str:
    """Draw the measured trials; "" where fewer than two have a latency and a quality."""
    shown = [t for t in record.trials if t.measured is not None and _point(t, record) is not None]
    if len(shown) < 2:
        return ""
    points = [point for t in shown if (point := _point(t, record)) is not None]
    bounds = _budgets(record)
    x = Axis.over([p[0] for p in points] + [v for v, _ in bounds[0]], LEFT + ROOM, WIDTH - RIGHT)
    y = Axis.over([p[1] for p in points] + [v for v, _ in bounds[1]], HEIGHT - BOTTOM - ROOM, TOP)
    names = search_tables.backends(record)
    largest = max(((t.measured or Measured()).memory or 0) for t in shown) or 1
    dots = "".join(
        _dot(trial, record, (x.place(a), y.place(b)), names.index(trial.candidate.backend), largest)
        for (a, b), trial in sorted(zip(points, shown, strict=True), key=lambda pair: -_memory(pair[1]))
    )
    line = _front(shown, points, x, y, is_score=record.budgets.metric is not None)
    body = _axes(x, y, record) + _lines(x, y, bounds) + line + dots
    words = f"{len(shown)} trials: latency across, {search_tables.loss_name(record)} up, memory as the size of a dot"
    hide = "".join(
        f"section:has(#show-{i}:not(:checked)) .backend-{i} {{ display: none; }}\n" for i in range(len(names))
    )
    key = "The line joins the front, dashed lines are budgets, the ring is the chosen trial. The table has all figures."
    return (
        f'<figure><style>{hide}</style>{_filters(names)}<svg class="plot" role="group" aria-label="{escape(words)}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}">{body}</svg><figcaption>{escape(key)}</figcaption></figure>'
    )


def _point(trial: TrialRecord, record: SearchRecord) -> tuple[float, float] | None:
    measured = trial.measured or Measured()
    quality = search_tables.loss(measured, record)
    if measured.latency is None or quality is None or not math.isfinite(quality):
        return None
    return measured.latency, quality


def _memory(trial: TrialRecord) -> int:
    return (trial.measured or Measured()).memory or 0


def _budgets(record: SearchRecord) -> tuple[list[tuple[float, str]], list[tuple[float, str]]]:
    """Return the budgets that lie along each axis."""
    budgets = record.budgets
    across = (
        []
        if budgets.max_latency is None
        else [(budgets.max_latency, f"budget {formatting.seconds(budgets.max_latency)}")]
    )
    if budgets.metric is not None:
        return across, [] if budgets.min_score is None else [
            (budgets.min_score, f"least score {budgets.min_score:g}")
        ]
    bound = record.max_drop if record.max_drop is not None else record.max_error
    return across, [] if bound is None else [(bound, f"budget {100 * bound:.3g} %")]


def _axes(x: Axis, y: Axis, record: SearchRecord) -> str:
    bottom, top, right = HEIGHT - BOTTOM, TOP, WIDTH - RIGHT
    parts = [f'<path class="axis" fill="none" d="M{LEFT} {top}V{bottom}H{right}"/>']
    is_score = record.budgets.metric is not None
    write: Callable[[float], str] = (lambda v: f"{v:.4g}") if is_score else (lambda v: f"{100 * v:.3g} %")
    for value in x.ticks():
        at = x.place(value)
        parts.append(f'<path class="axis" d="M{at:.1f} {bottom}v5"/>')
        text = formatting.seconds(value)
        parts.append(f'<text x="{at:.1f}" y="{bottom + 19}" text-anchor="middle">{escape(text)}</text>')
    for value in y.ticks():
        at = y.place(value)
        parts.append(f'<path class="axis" d="M{LEFT - 5} {at:.1f}h5"/>')
        parts.append(f'<text x="{LEFT - 9}" y="{at + 4:.1f}" text-anchor="end">{escape(write(value))}</text>')
    parts.append(f'<text x="{right}" y="{HEIGHT - 8}" text-anchor="end">latency of one call</text>')
    better = "higher is better" if is_score else "lower is better"
    name = f"{search_tables.loss_name(record)} ({better})"
    parts.append(f'<text x="{LEFT}" y="{top - 10}">{escape(name)}</text>')
    return "".join(parts)


def _lines(x: Axis, y: Axis, bounds: tuple[list[tuple[float, str]], list[tuple[float, str]]]) -> str:
    parts = []
    for value, words in bounds[0]:
        at = x.place(value)
        parts.append(f'<path class="budget" d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{at - 4:.1f}" y="{TOP + 12}" text-anchor="end">{escape(words)}</text>')
    for value, words in bounds[1]:
        at = y.place(value)
        parts.append(f'<path class="budget" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT}" y="{at - 5:.1f}" text-anchor="end">{escape(words)}</text>')
    return "".join(parts)


def _front(
    shown: Sequence[TrialRecord], points: Sequence[tuple[float, float]], x: Axis, y: Axis, *, is_score: bool
) -> str:
    """Draw the line through the trials that are Pareto-optimal in latency and quality."""
    sign = -1 if is_score else 1
    front: list[tuple[float, float]] = []
    for point in sorted(point for trial, point in zip(shown, points, strict=True) if trial.on_front):
        if not front or sign * point[1] < sign * front[-1][1]:
            front.append(point)
    if len(front) < 2:
        return ""
    path = "L".join(f"{x.place(a):.1f} {y.place(b):.1f}" for a, b in front)
    return f'<path class="front" d="M{path}"/>'


def _dot(
    trial: TrialRecord, record: SearchRecord, place: tuple[float, float], series: int, largest: int
) -> str:
    """Draw one trial as a focusable dot, with its figures shown above the plot."""
    size = SMALLEST + (LARGEST - SMALLEST) * math.sqrt(_memory(trial) / largest)
    _, label, latency, rate, memory, size_text, loss, outcome = search_tables.cells(trial, record)
    figures = f"{latency}, {rate}/s, memory {memory}, {size_text}, {search_tables.loss_name(record)} {loss}"
    ring = (
        f'<circle class="star" cx="{place[0]:.1f}" cy="{place[1]:.1f}" r="{size + 5:.1f}"/>'
        if trial.chosen
        else ""
    )
    marks = ", chosen" if trial.chosen else ", on the front" if trial.on_front else ""
    tip = (
        f'<g class="tip"><rect x="0" y="0" width="{WIDTH}" height="{TOP - 8}"/>'
        f'<text x="4" y="15" font-weight="600">{escape(label + marks)}: {escape(outcome[:70])}</text>'
        f'<text x="4" y="32">{escape(figures)}</text></g>'
    )
    words = f"{label}{marks}: {figures}; {outcome}"
    return (
        f'<g class="dot backend-{series}" tabindex="0" role="img" aria-label="{escape(words)}">'
        f'<circle class="s{series % SERIES}" cx="{place[0]:.1f}" cy="{place[1]:.1f}" r="{size:.1f}"/>{ring}{tip}</g>'
    )


def _filters(names: Sequence[str]) -> str:
    boxes = []
    for index, name in enumerate(names):
        box = f'<input type="checkbox" id="show-{index}" checked>'
        boxes.append(f"<label>{box}{swatch(f's{index % SERIES}')}{escape(name)}</label>")
    return f'<fieldset class="filters"><legend>Backends</legend>{"".join(boxes)}</fieldset>'


def trials_table(record: SearchRecord) -> str:
    """Write the buttons of the orders, and the table of all trials."""
    trials = search_tables.ranked(record)
    places = [_places(trials, value) for value in _values(record)]
    names = search_tables.backends(record)
    columns = search_tables.COLUMNS
    heads = "".join(
        f'<th scope="col" role="columnheader"{number_class(column)}>{escape(column.name)}</th>'
        for column in columns
    )
    rows = []
    for number, trial in enumerate(trials):
        style = ";".join(f"--by-{index}:{place[number]}" for index, place in enumerate(places))
        cells = "".join(
            f'<td role="cell"{number_class(column)} data-head="{escape(column.name)}">'
            f"{cell_html(cell, right=column.right)}</td>"
            for column, cell in zip(columns, search_tables.cells(trial, record), strict=True)
        )
        kind = f"backend-{names.index(trial.candidate.backend)}"
        rows.append(f'<tr role="row" class="{kind}" style="{style}">{cells}</tr>')
    return (
        f'{_buttons()}<table class="trials" role="table"><caption>{search_tables.CAPTION}</caption>'
        f'<thead role="rowgroup"><tr role="row">{heads}</tr></thead>'
        f'<tbody role="rowgroup">{"".join(rows)}</tbody></table>'
    )


def _values(record: SearchRecord) -> list[Value]:
    """Return the value of each of `ORDERS`, lower first; None stands last."""

    def of(value: Callable[[Measured], float | None], *, highest: bool = False) -> Value:
        def known(trial: TrialRecord) -> float | None:
            figure = value(trial.measured or Measured())
            return None if figure is None else -figure if highest else figure

        return known

    is_score = record.budgets.metric is not None
    return [
        lambda trial: 0.0,
        of(lambda m: m.latency),
        of(lambda m: m.throughput, highest=True),
        of(lambda m: m.memory_with_cache(*record.budgets.cache_tokens)),
        of(lambda m: m.size),
        of(lambda m: search_tables.loss(m, record), highest=is_score),
    ]


def _places(trials: list[TrialRecord], value: Value) -> list[int]:
    """Return the place of each trial in an order; equal ones keep theirs."""

    def key(index: int) -> float:
        figure = value(trials[index])
        return math.inf if figure is None or math.isnan(figure) else figure

    order = sorted(range(len(trials)), key=key)
    places = [0] * len(trials)
    for place, index in enumerate(order):
        places[index] = place
    return places


def _buttons() -> str:
    buttons = "".join(
        f'<label><input type="radio" name="sort" id="sort-{index}"{" checked" if not index else ""}>{name}</label>'
        for index, name in enumerate(ORDERS)
    )
    return f'<fieldset class="sort"><legend>Sort by</legend>{buttons}</fieldset>'
