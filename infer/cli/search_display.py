"""The live display of a search on a terminal: the running trial, time left, best and front so far."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from ..budget_search.progress import SearchReporter, State
from ..report.rendering.formatting import seconds, size
from ..report.rendering.text_layout import Column, Table
from ..report.search_record import Measured
from ..report.search_tables import loss_value_text
from ..spec import Finding

MOST = 6  # rows of the front
FIGURES = "latency", "per second", "memory", "size", "loss"
COLUMNS = Column("front so far"), *(Column(name, right=True) for name in FIGURES)


class LiveReporter(SearchReporter):
    """Redraws a few lines; with `verbose` the result of each trial is printed above them."""

    def __init__(self, live: Live, *, verbose: bool = False) -> None:
        super().__init__()
        self._live, self._verbose = live, verbose
        self._spinner = Spinner("dots")

    def state(self, now: State) -> None:
        self._live.update(view(now, self._spinner))

    def show(self, finding: Finding) -> None:
        if self._verbose and finding.stage == "search":
            self._live.console.print(Text(f"{finding.what}: {finding.why}"))


def view(now: State, spinner: Spinner | None = None) -> Group:
    """Render the state of a search: two lines, and at most `MOST` rows of its Pareto front."""
    doing = f"trial {now.number}: {now.running}" if now.running else f"{now.number} trials"
    left = "" if now.left is None else f", {max(0.0, now.left):.0f} s left"
    head = (
        Text(f"{doing}  ", style="bold") + Text(now.step, style="dim") + Text(f"  {now.elapsed:.0f} s{left}")
    )
    if spinner is not None:
        spinner.update(text=head)
    best = "nothing within the budgets yet" if now.best is None else now.best.candidate.label
    rows = []
    for record in now.front[:MOST]:
        measured = record.measured or Measured()
        rate = measured.throughput
        cells = (
            record.candidate.label,
            seconds(measured.latency),
            "-" if rate is None else f"{rate:,.0f}",
            size(measured.memory_with_cache(*now.budgets.cache_tokens)),
            size(measured.size),
            loss_value_text(
                measured.error if measured.score is None else measured.score,
                is_score=measured.score is not None,
            ),
        )
        rows.append(cells)
    parts = [spinner or head, Text(f"best so far: {best}"), *([Table(COLUMNS, rows)] if rows else [])]
    return Group(*parts)


@contextmanager
def search_reporter(console: Console, *, verbose: bool = False) -> Iterator[LiveReporter]:
    """Yield a live display of a search, which is removed at the end."""
    with Live(console=console, transient=True, refresh_per_second=8) as live:
        yield LiveReporter(live, verbose=verbose)
