"""`infer trials`: what searches measured on this machine and others."""

from __future__ import annotations

import json
import time
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .options import AsJson

HEADS = ("when", "source", "trial", "latency", "size", "outcome")


def trials(
    source: Annotated[
        str | None, typer.Argument(metavar="[SOURCE]", help="only trials of this model; default: of all")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="forget what is listed")] = False,
    as_json: AsJson = False,
) -> None:
    """List the trials that searches keep, so that the same search does not repeat them."""
    from ..budget_search import journal
    from ..report.rendering.formatting import seconds, size
    from ..report.search_record import Measured

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
    table = Table(box=None, pad_edge=False)
    for index, name in enumerate(HEADS):
        table.add_column(
            name, justify="right" if index in (3, 4) else "left", overflow="fold", header_style="dim"
        )
    for path, made, record in found:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(made))
        own = record.measured or Measured()
        said = record.outcome if record.outcome == "published" else f"{record.outcome}: {record.reason}"
        cells = (when, path, record.candidate.label, seconds(own.latency), size(own.size), said)
        table.add_row(*(Text(cell) for cell in cells))
    console = Console()
    console.print(table)
    console.print(f"{len(found)} trials{', forgotten' if fresh else ''}", highlight=False)
