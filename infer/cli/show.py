"""What the command line prints: progress on stderr while it runs, the result on stdout."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..pipeline import Watch
from ..report import document, terminal
from ..spec import Finding


class Plain(Watch):
    """One line per step, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console, self._start = console, time.perf_counter()

    def step(self, name: str, detail: str = "") -> None:
        seconds = time.perf_counter() - self._start
        self._console.print(
            f"{seconds:7.1f} s  {name}  {detail}", markup=False, highlight=False, soft_wrap=True
        )


class Bars(Watch):
    """A moving line for the step at work and a bar for what can be counted."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._task = progress, progress.add_task("starting", total=None)

    def step(self, name: str, detail: str = "") -> None:
        self._progress.update(self._task, completed=1, total=1)
        self._progress.stop_task(self._task)
        self._task = self._progress.add_task(f"{name:<8} [dim]{escape(detail)}", total=None)

    def progress(self, done: int, total: int, what: str) -> None:
        self._progress.update(self._task, completed=done, total=total)


@contextmanager
def watching(*, quiet: bool) -> Iterator[Watch]:
    """The watch that fits where stderr goes."""
    console = Console(stderr=True)
    if quiet:
        yield Watch()
    elif not console.is_terminal:
        yield Plain(console)
    else:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), TimeElapsedColumn())
        with Progress(*columns, console=console) as progress:
            yield Bars(progress)


def report(report: document.Report, *, as_json: bool, path: Path) -> None:
    if as_json:
        print(document.encode(report).decode())
        return
    console = Console()
    terminal.render_terminal(report, console)
    console.print(f"artifact: {path}", markup=False, highlight=False, soft_wrap=True)


def facts(values: Mapping[str, Any], *, as_json: bool) -> None:
    """Name and value, one a line."""
    if as_json:
        print(msgspec.json.encode(values).decode())
        return
    width = max(len(name) for name in values)
    for name, value in values.items():
        text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        if isinstance(value, Mapping):
            text = ", ".join(f"{key} {item}" for key, item in value.items())
        print(f"{name:<{width}}  {text or '-'}")


def doctor(rows: list[Finding], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([msgspec.to_builtins(row) for row in rows]))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("what", "name", "value", "why"):
        table.add_column(column, overflow="fold")
    for row in rows:
        value = f"{row.value:.1f}" if isinstance(row.value, float) else str(row.value)
        table.add_row(row.stage, escape(row.what), escape(f"{value} {row.unit}".strip()), escape(row.why))
    Console().print(table)
