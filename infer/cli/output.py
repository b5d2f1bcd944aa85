"""Printing: progress on stderr while a command runs, its result on stdout."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ..report import document
from ..report.rendering import formatting, optimize_summary, terminal
from ..report.rendering.text_layout import Column, Table, show
from ..reporter import Reporter
from ..sanitize import sanitize_text
from ..spec import Finding

if TYPE_CHECKING:
    from ..tune.memory.technique_table import TechniqueRow

MAX_FACT = 1 << 16  # characters
TOLD = ("train", "download")  # steps whose progress has words: losses, time left, bytes
BAR = 20  # columns
BESIDE = 2 + 1 + 1 + BAR + 1 + 7 + 1 + 7  # columns beside the text: spinner, bar, time, time left, with gaps
EVERY = 10.0  # seconds between two lines of such a step, or of steps of one stage, in a log


class LineReporter(Reporter):
    """Progress for logs and pipes: a line for each stage, and for a later step of one where the last line is old; with
    `verbose` for each step and finding.
    """

    def __init__(self, console: Console, *, verbose: bool = False) -> None:
        super().__init__()
        self._console, self._verbose, self._start = console, verbose, time.perf_counter()
        self._stages: set[str] = set()
        self._stage, self._last = "", self._start

    def step(self, name: str, detail: str = "") -> None:
        self._stage, now = name, time.perf_counter()
        if name in self._stages and not self._verbose and now - self._last < EVERY:
            return
        self._stages.add(name)
        self._last = now
        self._print(f"{now - self._start:7.1f} s  {name}  {detail}")

    def progress(self, done: int, total: int, what: str) -> None:
        now = time.perf_counter()
        if self._stage in TOLD and now - self._last >= EVERY:
            self._last = now
            self._print(f"{now - self._start:7.1f} s  {self._stage}  {what}")

    def show(self, finding: Finding) -> None:
        if self._verbose:
            self._print(f"           {sentence(finding)}")

    def _print(self, line: str) -> None:
        self._console.print(sanitize_text(line), markup=False, highlight=False, soft_wrap=True)


class BarReporter(Reporter):
    """Progress on a terminal: a spinner for the current step, a bar for what can be counted; removed at the end."""

    def __init__(self, progress: Progress, *, verbose: bool = False) -> None:
        super().__init__()
        self._progress, self._verbose = progress, verbose
        self._task = progress.add_task("starting", total=None)
        self._stage = ""

    def step(self, name: str, detail: str = "") -> None:
        self._stage = name
        self._progress.update(self._task, completed=1, total=1)
        self._progress.stop_task(self._task)
        self._task = self._progress.add_task(self._line(name, detail), total=None)

    def progress(self, done: int, total: int, what: str) -> None:
        self._progress.update(self._task, completed=done, total=total)
        if self._stage in TOLD:
            self._progress.update(self._task, description=self._line(self._stage, what))

    def show(self, finding: Finding) -> None:
        if self._verbose:
            self._progress.console.print(sentence(finding), markup=False, highlight=False)

    def _line(self, name: str, detail: str) -> str:
        """Write a step in one line that leaves room for its bar and its time: of a long path both ends are shown."""
        room = max(8, self._progress.console.width - BESIDE - max(8, len(name)))
        half, detail = (room - 1) // 2, sanitize_text(detail)
        shown = detail if len(detail) <= room else f"{detail[:half]}…{detail[-half:]}"
        return f"{name:<8} [dim]{escape(shown)}"


def sentence(finding: Finding) -> str:
    """Format a finding: `load: weights 1.216 MB (holds 45 tensors)`."""
    why = f" ({finding.why})" if finding.why else ""
    return f"{finding.stage}: {finding.what} {formatting.number(finding.value, finding.unit)}{why}"


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
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(BAR),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, transient=not verbose) as progress:
            yield BarReporter(progress, verbose=verbose)


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
