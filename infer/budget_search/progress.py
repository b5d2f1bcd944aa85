"""State of a running search: for a display that draws it, and in a file from which other processes read it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from .. import paths
from ..budgets import Budgets
from ..report.search_record import TrialRecord
from ..reporter import Reporter
from .feasibility import objective_text
from .final_artifact import mark
from .known_trials import KnownTrials


class State(msgspec.Struct, frozen=True):
    """A search at one moment: the running trial with its step, seconds, the best so far and the front so far."""

    number: int  # of trials, the running one included
    running: str
    step: str
    elapsed: float
    left: float | None  # None: no limit of time
    best: TrialRecord | None
    front: tuple[TrialRecord, ...]
    budgets: Budgets
    source: str = ""
    output: str = ""


def current_state(known: KnownTrials, running: str, step: str, output: str) -> State:
    """Return the state that follows from the trials so far; its seconds are for the caller to fill in."""
    records = mark(list(known.records.values()), known.budgets, known.limits)
    return State(
        number=len(records) + bool(running),
        running=running,
        step=step,
        elapsed=0.0,
        left=None,
        best=known.best,
        front=tuple(sorted((r for r in records if r.on_front), key=known.cost)),
        budgets=known.budgets,
        source=os.path.abspath(known.plan.source),
        output=output,
    )


def progress_text(known: KnownTrials, left: float | None) -> str:
    """Write the best trial so far and the seconds left: ` · best ort int8 1.21 ms · 12 s left`; "" without both."""
    best = known.best
    parts = [] if best is None else [f"best {best.candidate.label} {objective_text(best, known.budgets)}"]
    parts += [] if left is None else [f"{left:.0f} s left"]
    return f" · {' · '.join(parts)}" if parts else ""


class RunningSearch(msgspec.Struct, frozen=True):
    """A search that another process runs: its state, as old as `written` (seconds since 1970)."""

    pid: int
    written: float
    state: State

    def now(self) -> State:
        """Return the state with the seconds that passed since it was written."""
        passed = max(0.0, time.time() - self.written)
        left = None if self.state.left is None else self.state.left - passed
        return msgspec.structs.replace(self.state, elapsed=self.state.elapsed + passed, left=left)


class SearchReporter(Reporter):
    """A reporter that draws a search: it gets its state in place of the steps of the trials."""

    def state(self, now: State) -> None:
        """Show the state of the search."""


class StateFile:
    """The file of this process's search, `<cache>/search/running/PID.json`; gone when the context ends.

    A place that can't be written costs the view from other processes and nothing else.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or running_folder()
        self._path = self._folder / f"{os.getpid()}.json"

    def __enter__(self) -> StateFile:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def write(self, state: State) -> None:
        """Replace the state, in one step for readers."""
        fresh = self._path.with_suffix(".part")
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            fresh.write_bytes(msgspec.json.encode(RunningSearch(os.getpid(), time.time(), state)))
            fresh.replace(self._path)


def running_folder() -> Path:
    return paths.cache("search") / "running"


def running_searches(source: str | None = None, folder: Path | None = None) -> list[RunningSearch]:
    """List the searches that this user runs on this machine, of one source or of all, the longest first.

    Files of processes that were killed are deleted.
    """
    found = []
    for path, search in _files(folder or running_folder()):
        if not _wrote(search):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        elif source is None or os.path.abspath(source) == search.state.source:
            found.append(search)
    return sorted(found, key=lambda one: one.state.elapsed, reverse=True)


def _files(folder: Path) -> Iterator[tuple[Path, RunningSearch]]:
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            yield path, msgspec.json.decode(path.read_bytes(), type=RunningSearch)


def _wrote(search: RunningSearch) -> bool:
    """Return True when the process that wrote the state still runs, and is no later one with its number."""
    try:
        return psutil.Process(search.pid).create_time() <= search.written
    except psutil.Error:
        return False
