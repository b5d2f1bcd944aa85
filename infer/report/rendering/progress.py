"""Progress of a run for people: lines in a log, bars on a terminal and in a notebook."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

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

from ...reporter import Reporter
from ...sanitize import sanitize_text
from ...spec import Finding
from . import formatting

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
def progress_bars(console: Console, *, verbose: bool = False) -> Iterator[Reporter]:
    """Yield a reporter that shows bars on a terminal or in a notebook; without `verbose` they go at the end."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(BAR),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=not verbose) as progress:
        yield BarReporter(progress, verbose=verbose)
