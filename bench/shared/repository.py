"""Folders of the repository, and the start of other modules of `bench` as processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "models"
RESULTS = ROOT / "bench" / "results"


def module_command(module: str, *words: str) -> list[str]:
    """Return the command that runs `module` with this Python; start it with `child_environment()`."""
    return [sys.executable, "-m", module, *words]


def child_environment(**more: str) -> dict[str, str]:
    """Return this process's environment plus `more`, with the repository first on PYTHONPATH."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **more}
