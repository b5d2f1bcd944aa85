"""Checkpoints of the models table: files and folders as they lie around, and the sentence that each gets.

One column: opened, with a remark on what was done to the file, or refused with the way out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.models.checks import Cells

TITLE = "Checkpoints"
COLUMNS = ("opens",)
ENTRIES: dict[str, Callable[[Path], Cells]] = {}


def run(name: str, folder: Path) -> Cells:
    """Compute the cells of one row."""
    yield from ENTRIES[name](folder)


def entry(name: str) -> Callable[[Any], Any]:
    """Register a function of the row's folder that yields its cells."""

    def register(function: Callable[[Path], Cells]) -> Callable[[Path], Cells]:
        ENTRIES[name] = function
        return function

    return register
