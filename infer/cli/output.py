"""Printing: progress on stderr while a command runs, its result on stdout."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console

from ..report import document
from ..report.rendering import formatting, optimize_summary, terminal
from ..report.rendering.progress import LineReporter, progress_bars
from ..report.rendering.text_layout import Column, Table, show
from ..reporter import Reporter
from ..sanitize import sanitize_text
from ..spec import Finding

if TYPE_CHECKING:
    from ..tune.memory.technique_table import TechniqueRow

MAX_FACT = 1 << 16  # characters


@contextmanager
def progress_reporter(*, quiet: bool, verbose: bool = False, search: bool = False) -> Iterator[Reporter]:
    """Yield the progress display that fits stderr: none, plain lines or bars; of a search its front so far."""
    console = Console(stderr=True)
    if quiet:
        yield Reporter()
    elif search and console.is_terminal:
        from .search_display import search_reporter

        with search_reporter(console, verbose=verbose) as live:
            yield live
    elif not console.is_terminal:
        yield LineReporter(console, verbose=verbose)
    else:
        with progress_bars(console, verbose=verbose) as bars:
            yield bars


def print_verdict(report: document.Report, *, as_json: bool, path: Path, verbose: bool = False) -> None:
    """Print the end of `optimize`: the verdict on one screen, with `verbose` after every table."""
    if as_json:
        print(document.encode(report).decode())
        return
    console = Console()
    if verbose:
        terminal.render_terminal(report, console)
        console.print()
    optimize_summary.render_screen(report, console, path)


def print_report(report: document.Report, *, as_json: bool, path: Path) -> None:
    """Print every table of a report, and the path of its artifact."""
    if as_json:
        print(document.encode(report).decode())
        return
    console = Console()
    terminal.render_terminal(report, console)
    console.print()
    show(console, Table((Column(""), Column("")), [("artifact", str(path))]))


def print_memory_table(rows: Sequence[TechniqueRow], *, as_json: bool) -> None:
    """Print memory and time of training by technique."""
    if as_json:
        print(msgspec.json.encode(rows).decode())
        return
    sizes = ("planned", "measured", "time")
    columns = Column("technique"), *(Column(head, right=True) for head in sizes), Column("")
    cells = [
        (
            row.technique,
            *map(formatting.size, (row.planned, row.measured)),
            formatting.seconds(row.seconds),
            row.why,
        )
        for row in rows
    ]
    show(Console(), Table(columns, cells))


def print_facts(values: Mapping[str, Any], *, as_json: bool) -> None:
    """Print names and values; those wider than the terminal wrap."""
    if as_json:
        print(msgspec.json.encode(values).decode())
        return
    rows = []
    for name, value in values.items():
        text = "; ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        if isinstance(value, bool):
            text = "yes" if value else "no"
        elif isinstance(value, Mapping):
            text = ", ".join(f"{key} {item}" for key, item in value.items())
        rows.append((name, sanitize_text(text, MAX_FACT) or "-"))
    show(Console(), Table((Column(""), Column("")), rows))


def print_doctor(rows: list[Finding], *, as_json: bool) -> None:
    """Print the findings of `infer doctor` as a table."""
    if as_json:
        print(json.dumps([msgspec.to_builtins(row) for row in rows]))
        return
    cells = []
    for row in rows:
        value = f"{row.value:.1f}" if isinstance(row.value, float) else str(row.value)
        cells.append((row.stage, row.what, f"{value} {row.unit}".strip(), row.why))
    show(Console(), Table(tuple(map(Column, ("what", "name", "value", "why"))), cells))
