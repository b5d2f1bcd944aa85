"""`infer trials`: what searches measured on this machine and others, and a live view of those that run."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from ..errors import UsageError
from .options import AsJson

if TYPE_CHECKING:
    from ..budget_search.progress import RunningSearch
    from ..report.search_record import TrialRecord

INTERVAL = 1.0  # seconds between two looks at the running searches


def trials(
    source: Annotated[
        str | None, typer.Argument(metavar="[SOURCE]", help="only trials of this model; default: of all")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="forget what is listed")] = False,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="show the searches that run now until they end; into a pipe, once"),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the recorded trials, which later searches of the same source reuse.

    With --watch show the searches that run now on this machine: the trial, its step, the best and the front so far.
    """
    if watch:
        if fresh:
            raise UsageError("--watch shows what runs now, --fresh forgets what is kept: give one of them")
        watch_searches(source, as_json=as_json)
        return
    from ..budget_search import journal

    listed = journal.listed(source)
    if fresh:
        journal.forget(source)
    if as_json:
        rows = [
            {"source": s, "made": when, **msgspec.to_builtins(record, str_keys=True)}
            for s, when, record in listed
        ]
        print(json.dumps(rows))
        return
    if not listed:
        print("no trials are kept")
        return
    console = Console()
    _print(console, listed)
    console.print(f"{len(listed)} trials{', forgotten' if fresh else ''}", highlight=False)


def _print(console: Console, listed: Sequence[tuple[str, float, TrialRecord]]) -> None:
    """Print a table of the trials of each source; trials are (source, seconds since 1970, record)."""
    from ..report.rendering.formatting import seconds, size
    from ..report.rendering.text_layout import Column, Table, show, show_lines, width_of, wrap
    from ..report.search_record import Measured

    columns = (
        *map(Column, ("when", "trial")),
        *(Column(name, right=True) for name in ("latency", "size")),
        Column("outcome"),
    )
    by_source: dict[str, list[tuple[str, ...]]] = {}
    for source, ended, record in listed:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(ended))
        measured = record.measured or Measured()
        outcome = record.outcome if record.outcome == "published" else f"{record.outcome}: {record.reason}"
        row = when, record.candidate.label, seconds(measured.latency), size(measured.size), outcome
        by_source.setdefault(source, []).append(row)
    for source, rows in by_source.items():
        show_lines(console, wrap(source, width_of(console)), style="bold")
        show(console, Table(columns, rows))
        console.print()


def watch_searches(source: str | None, *, as_json: bool = False) -> None:
    """Draw the running searches anew every second until none is left, or once where nobody sees it change."""
    from ..budget_search.progress import running_searches

    searches, console = running_searches(source), Console()
    if as_json:
        rows = [
            {"pid": search.pid, **msgspec.to_builtins(search.now(), str_keys=True)} for search in searches
        ]
        print(json.dumps(rows))
    elif not searches:
        print("no search is running")
    elif not console.is_terminal:
        console.print(_view(searches))
    else:
        with Live(_view(searches), console=console, auto_refresh=False) as live:
            while searches:
                live.update(_view(searches), refresh=True)
                time.sleep(INTERVAL)
                searches = running_searches(source)
        print("the search ended")


def _view(searches: Sequence[RunningSearch]) -> Group:
    """Render each running search below a line with its source and output."""
    from .search_display import view

    parts: list[RenderableType] = []
    for search in searches:
        parts += [
            Text(f"{search.state.source} to {search.state.output} (process {search.pid})", style="bold")
        ]
        parts += [view(search.now())]
    return Group(*parts)
