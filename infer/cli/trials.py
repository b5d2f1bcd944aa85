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

    found = journal.listed(source)
    if fresh:
        journal.forget(source)
    if as_json:
        rows = [
            {"source": s, "made": made, **msgspec.to_builtins(record, str_keys=True)}
            for s, made, record in found
        ]
        print(json.dumps(rows))
        return
    if not found:
        print("no trials are kept")
        return
    console = Console()
    _print(console, found)
    console.print(f"{len(found)} trials{', forgotten' if fresh else ''}", highlight=False)


def _print(console: Console, found: Sequence[tuple[str, float, TrialRecord]]) -> None:
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
    for source, made, record in found:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(made))
        own = record.measured or Measured()
        said = record.outcome if record.outcome == "published" else f"{record.outcome}: {record.reason}"
        row = when, record.candidate.label, seconds(own.latency), size(own.size), said
        by_source.setdefault(source, []).append(row)
    for source, rows in by_source.items():
        show_lines(console, wrap(source, width_of(console)), style="bold")
        show(console, Table(columns, rows))
        console.print()


def watch_searches(source: str | None, *, as_json: bool = False) -> None:
    """Draw the running searches anew every second until none is left, or once where nobody sees it change."""
    from ..budget_search.progress import running_searches

    found, console = running_searches(source), Console()
    if as_json:
        rows = [{"pid": one.pid, **msgspec.to_builtins(one.now(), str_keys=True)} for one in found]
        print(json.dumps(rows))
    elif not found:
        print("no search is running")
    elif not console.is_terminal:
        console.print(_view(found))
    else:
        with Live(_view(found), console=console, auto_refresh=False) as live:
            while found:
                live.update(_view(found), refresh=True)
                time.sleep(INTERVAL)
                found = running_searches(source)
        print("the search ended")


def _view(found: Sequence[RunningSearch]) -> Group:
    """Render each running search below a line with its source and output."""
    from .search_display import view

    parts: list[RenderableType] = []
    for one in found:
        parts += [Text(f"{one.state.source} to {one.state.output} (process {one.pid})", style="bold")]
        parts += [view(one.now())]
    return Group(*parts)
