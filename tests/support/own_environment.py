"""Packages that a test needs in an environment of their own: made once in the user's cache, and kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

SECONDS = 600  # of one command


def interpreter(name: str, needs: Sequence[str]) -> Path:
    """Return the Python of the environment `name` that holds the packages; skip with the reason where it can't be made.

    Without a network it is what an earlier run left. `INFER_TEST_ENVIRONMENTS` names another folder for all of them.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "infer"
    folder = Path(os.environ.get("INFER_TEST_ENVIRONMENTS") or cache) / name
    done, python = folder / "installed", folder / "bin" / "python"
    if done.exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    install = [str(python), "-m", "pip", "install", "-q", "--retries", "1", "--timeout", "15", *needs]
    try:
        for command in ([sys.executable, "-m", "venv", str(folder)], install):
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
    except (subprocess.SubprocessError, OSError) as error:
        text = getattr(error, "stderr", None) or str(error)
        pytest.skip(f"{name} can't be installed: {text.strip().splitlines()[-1][:200]}")
    done.touch()
    return python
