"""Artifacts in the user's cache: made at the first use of a source with a plan, opened at later ones.

They are kept below `INFER_CACHE`; a damaged one, or one of another version of `infer`, is not looked at: versions and
machine are part of its name.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from .. import __version__, device, paths
from ..artifact.manifest import FORMAT, MANIFEST
from ..errors import BusyError
from ..plan import Plan
from ..reporter import Reporter

POLL = 0.5  # seconds between looks at an artifact that another process is making


def cached_artifact(
    plan: Plan, source_digest: str, name: str, make: Callable[[Path], object], reporter: Reporter | None = None
) -> Path:
    """Return the artifact of `plan` in the user's cache; where there is none, `make` is called with its path.

    `source_digest` stands for the weights and code of the source (a commit of a repository, a hash of weights);
    `plan.source` and other places of files are not part of the key. `name` is what people read in the path. While
    another process makes the same artifact, this one waits. What `make` raises is raised here; nothing stays of it.
    """
    place = paths.cache("artifacts") / f"{_file_name(name)}-{_key(plan, source_digest)}.infer"
    reporter = reporter or Reporter()
    waiting = False
    while not (place / MANIFEST).exists():
        try:
            make(place)
        except BusyError:
            if place.exists():  # not by a run, which renames a whole artifact
                raise
            if not waiting:
                reporter.step("wait", "another process makes the same artifact")
            waiting = True
            time.sleep(POLL)
    return place


def _key(plan: Plan, source_digest: str) -> str:
    asked = {**msgspec.to_builtins(plan), "source": source_digest}
    facts = [asked, __version__, FORMAT, device.fingerprint(), device.versions()]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-.")[:64] or "model"
