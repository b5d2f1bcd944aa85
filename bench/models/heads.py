"""Heads of the models table: encoders and other models with the heads that people publish.

Columns: the folder opens with its task; the outputs equal those of transformers; int8:weight and nf4 pass their gate;
the artifact is served.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.models.checks import Cells

TITLE = "Heads"
COLUMNS = ("opens", "equals transformers", "int8:weight", "nf4", "served")
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
