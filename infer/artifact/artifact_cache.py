"""Artifacts in the user's cache: made at the first use of a source with a plan, opened at later ones.

They are kept below `INFER_CACHE`; a damaged one, or one of another version of `infer`, is not looked at: versions and
machine are part of its name. Nothing here imports torch: a server that opens such an artifact does not either.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from .. import __version__, machine, paths
from ..errors import BusyError
from ..plan import Plan
from ..reporter import Reporter
from . import store
from .manifest import FORMAT, MANIFEST


def cached_artifact(
    plan: Plan,
    source_digest: str,
    name: str,
    make: Callable[[Path], object],
    reporter: Reporter | None = None,
) -> Path:
    """Return the artifact of `plan` in the user's cache; where there is none, `make` is called with its path.

    `source_digest` stands for the weights and code of the source (a commit of a repository, a hash of weights);
    `plan.source` is not part of the key, and of other files that the plan names, their sizes and times are. `name` is
    that of the artifact. While another process makes the same one, this one waits. What `make` raises is raised here;
    nothing stays of it.
    """
    place, reporter = place_of(plan, source_digest, name), reporter or Reporter()
    while not (place / MANIFEST).exists():
        try:
            make(place)
        except BusyError:
            if (
                place.exists() and not (place / MANIFEST).exists()
            ):  # not by a run, which renames a whole artifact
                raise
            reporter.step("wait", "another process makes the same artifact")
            store.wait_for_writer(place)
    return place


def place_of(plan: Plan, source_digest: str, name: str) -> Path:
    """Return the path of an artifact in the cache, whether it is there or not; see `cached_artifact`."""
    name = _file_name(name)
    return paths.cache("artifacts") / f"{name}-{_key(plan, source_digest)}" / f"{name}.infer"


def digest_of_files(path: Path) -> str:
    """Return a digest of the names, sizes and times of a file, or of every file of a folder; nothing is read."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    facts: list[Any] = [str(path.absolute())]
    for file in files:
        if file.is_file():
            state = file.stat()
            facts.append([str(file), state.st_size, state.st_mtime_ns])
    return _digest(facts)


def _key(plan: Plan, source_digest: str) -> str:
    asked = {**msgspec.to_builtins(plan), "source": source_digest}
    named = [_file_of(text) for text in (plan.data, plan.model, plan.weights, plan.chat_template) if text]
    files = [digest_of_files(path) for path in named if path.exists()]
    here = [machine.fingerprint(), machine.gpus(), machine.versions()]
    return _digest([asked, files, __version__, FORMAT, here])[:16]


def _file_of(text: str) -> Path:
    """Return the file that an option names: of FILE.py:FUNCTION the file."""
    file, colon, _ = text.rpartition(":")
    return Path(file if colon and file.endswith(".py") else text)


def _digest(facts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-.")[:64] or "model"
