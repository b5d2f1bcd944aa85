"""Table of the trials of a search in the HTML report: filtered by backend, sorted by any figure, without a script.

Each row knows its place in every order; the radio button that is checked says which one the style sheet takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape

from . import search_tables
from .rendering.cells import cell_html
from .rendering.text_layout import Column
from .search_record import Measured, SearchRecord, TrialRecord

Value = Callable[[TrialRecord], float | None]
ORDERS = ("outcome", "latency", "per second", "memory", "size", "loss")

CSS = (
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


def trials_table(record: SearchRecord) -> str:
    """Write the buttons of the orders, and the table of all trials."""
    trials = search_tables.ranked(record)
    places = [_places(trials, value) for value in _values(record)]
    names = search_tables.backends(record)
    columns = search_tables.COLUMNS
    heads = "".join(
        f'<th scope="col" role="columnheader"{_number(column)}>{escape(column.name)}</th>'
        for column in columns
    )
    rows = []
    for number, trial in enumerate(trials):
        style = ";".join(f"--by-{index}:{place[number]}" for index, place in enumerate(places))
        cells = "".join(
            f'<td role="cell"{_number(column)} data-head="{escape(column.name)}">'
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
            found = value(trial.measured or Measured())
            return None if found is None else -found if highest else found

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
        found = value(trials[index])
        return math.inf if found is None or math.isnan(found) else found

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


def _number(column: Column) -> str:
    return ' class="num"' if column.right else ""
