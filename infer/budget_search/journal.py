"""Journal of trials measured before, by source, data, machine, versions and code, in SQLite.

Beside it are the artifacts of the best of them, `artifacts/SOURCE/TRIAL`: with its artifact a trial can be timed once
more, and published, without being made.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import msgspec

from .. import __version__, hub, paths
from .. import device as hardware
from ..artifact import store
from ..budgets import Budgets
from ..errors import InferError
from ..plan import Plan
from ..report.search_record import Candidate, TrialRecord

KEPT = ("published", "refused", "crashed", "failed", "out of memory")  # what a repeated trial would say again
MOST_BYTES = 1 << 30  # of all artifacts that are kept
_TABLE = """CREATE TABLE IF NOT EXISTS trials (
    trial TEXT NOT NULL, machine TEXT NOT NULL, source TEXT NOT NULL, made REAL NOT NULL, record BLOB NOT NULL,
    PRIMARY KEY (trial, machine))"""


class Journal:
    """Trials of one source with its data. A file that can't be read or written only costs the resuming."""

    def __init__(
        self, plan: Plan, budgets: Budgets, path: Path | None = None, room: int = MOST_BYTES
    ) -> None:
        self._path, self._room = path or default_path(), room
        self._plan, self._shared = plan, _digest(json.dumps(digests(plan, budgets), sort_keys=True))
        self._machine = machine(plan.device)

    def find(self, candidate: Candidate) -> TrialRecord | None:
        """Return the recorded trial of a candidate; of another machine only if it failed the fidelity gate."""
        with _opened(self._path) as file:
            rows = file.execute(
                "SELECT machine, record FROM trials WHERE trial = ? ORDER BY machine = ? DESC, made DESC",
                (self._key(candidate), self._machine),
            ).fetchall()
        for where, data in rows:
            with contextlib.suppress(msgspec.MsgspecError):
                record = msgspec.json.decode(data, type=TrialRecord)
                unfaithful = record.measured is not None and not record.measured.faithful
                if where == self._machine or unfaithful:
                    return msgspec.structs.replace(record, from_journal=True)
        return None

    def add(self, record: TrialRecord) -> None:
        """Keep a trial whose outcome would be the same again."""
        lost = record.outcome == "skipped" and record.measured is not None  # in a race that may be run again
        if (record.outcome not in KEPT and not lost) or record.from_journal:
            return
        row = (self._key(record.candidate), self._machine, os.path.abspath(self._plan.source), time.time())
        with _opened(self._path) as file:
            file.execute(
                "INSERT OR REPLACE INTO trials VALUES (?, ?, ?, ?, ?)", (*row, msgspec.json.encode(record))
            )

    def keep(self, artifacts: Sequence[tuple[Candidate, Path]]) -> None:
        """Link artifacts, the best first, and delete the oldest ones of all sources beyond the room.

        What is larger than the room is left out. A disk that is full costs the resuming and nothing else.
        """
        with contextlib.suppress(OSError):
            for candidate, artifact in reversed(artifacts):
                place = self._place(candidate)
                if place.exists():
                    os.utime(place)
                elif store.size(artifact) <= self._room:
                    _link_tree(artifact, place / artifact.name)
            every = _artifacts(self._path).glob("*/*")
            kept = sorted(every, key=lambda folder: folder.stat().st_mtime, reverse=True)
            sizes = list(itertools.accumulate(map(store.size, kept)))
            for folder, used in zip(kept, sizes, strict=True):
                if used > self._room:
                    shutil.rmtree(folder, ignore_errors=True)

    def restore(self, candidate: Candidate, work: Path) -> Path | None:
        """Link the artifact of a trial into a folder of its own below `work`, verified; None where there is none."""
        place = self._place(candidate)
        kept = next(place.glob("*"), None)
        if kept is None:
            return None
        artifact = work / f"kept-{place.name[:16]}" / kept.name
        with contextlib.suppress(OSError, InferError):
            _link_tree(kept, artifact)
            store.verify(artifact, store.read_manifest(artifact))
            if store.signed_here(artifact):
                return artifact
        for folder in (artifact.parent, place):
            shutil.rmtree(folder, ignore_errors=True)
        return None

    def _place(self, candidate: Candidate) -> Path:
        """Return the folder of a trial's artifact, by all that it depends on, the machine included."""
        return _artifacts(self._path, self._plan.source) / _digest(self._key(candidate), self._machine)

    def _key(self, candidate: Candidate) -> str:
        asked = msgspec.json.encode(candidate.plan(self._plan)).decode()
        return _digest(self._shared, asked)


def default_path() -> Path:
    return paths.cache("search") / "trials.sqlite"


def listed(source: str | None = None, path: Path | None = None) -> list[tuple[str, float, TrialRecord]]:
    """List source, time and record of the trials of a source, or of all, the latest first."""
    where, values = _of_source(source)
    with _opened(path or default_path()) as file:
        rows = file.execute(
            f"SELECT source, made, record FROM trials {where} ORDER BY made DESC", values
        ).fetchall()
    found = []
    for name, made, data in rows:
        with contextlib.suppress(msgspec.MsgspecError):
            found.append((name, made, msgspec.json.decode(data, type=TrialRecord)))
    return found


def forget(source: str | None = None, path: Path | None = None) -> int:
    """Forget the trials of a source, or all, with their artifacts; return how many trials there were."""
    shutil.rmtree(_artifacts(path or default_path(), source), ignore_errors=True)
    where, values = _of_source(source)
    with _opened(path or default_path()) as file:
        return file.execute(f"DELETE FROM trials {where}", values).rowcount


def _artifacts(path: Path, source: str | None = None) -> Path:
    """Return the folder of the artifacts of a source, or of all, beside the journal at `path`."""
    every = path.parent / "artifacts"
    return every if source is None else every / _digest(os.path.abspath(source))[:16]


def _link_tree(source: Path, place: Path) -> None:
    """Make a tree of hard links, an artifact being never edited, or of copies on another file system.

    The tree is there as a whole or not at all.
    """

    def link(old: str, new: str) -> None:
        try:
            os.link(old, new)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
                raise
            shutil.copy2(old, new)

    try:
        shutil.copytree(source, place, copy_function=link)
    except OSError:
        shutil.rmtree(place.parent, ignore_errors=True)
        raise


def _of_source(source: str | None) -> tuple[str, tuple[str, ...]]:
    return ("", ()) if source is None else ("WHERE source = ?", (os.path.abspath(source),))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the journal; a damaged one is put aside and begun anew."""
    try:
        file = _connect(path)
    except sqlite3.DatabaseError:
        os.replace(path, path.with_suffix(".damaged"))
        file = _connect(path)
    try:
        with file:
            yield file
    finally:
        file.close()


def _connect(path: Path) -> sqlite3.Connection:
    file = sqlite3.connect(path, timeout=30.0)
    try:
        file.execute(_TABLE)
    except sqlite3.DatabaseError:
        file.close()
        raise
    return file


def machine(device: str) -> str:
    """Return what times depend on: processor, instruction sets, number of cores, GPU."""
    marks = hardware.fingerprint("cpu" if device in ("auto", "cpu") else device)
    return json.dumps({**marks, "cores": str(os.cpu_count())}, sort_keys=True)


def digests(plan: Plan, budgets: Budgets) -> dict[str, str]:
    """Digest by name everything that a trial's result depends on besides its plan and the machine."""
    named = {
        "source": plan.source,
        "data": plan.data,
        "model": plan.model,
        "weights": plan.weights,
        "chat template": plan.chat_template,
        "metric": budgets.metric,
    }
    contents = {what: _digest_of(name) for what, name in named.items() if name}
    if on_hub := hub.named(plan.source):
        contents["source"] = f"{on_hub} {hub.commit_of(on_hub)}"
    versions = json.dumps(hardware.versions(), sort_keys=True)
    return {
        "version of infer": __version__,
        "code of infer": code_digest(),
        "libraries": versions,
        **contents,
    }


def _digest_of(name: str) -> str:
    """Digest the content of a file, of every file of a folder, or the text of a name like `timm:resnet18`."""
    path = Path(name)
    if not path.exists() and ":" in name:
        path = Path(name.rpartition(":")[0])
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file())
        return _digest(*(f"{p.relative_to(path)} {_digest_of(str(p))}" for p in files))
    return name


@cache
def code_digest() -> str:
    """Digest the source files of infer and of its backends."""
    root = Path(__file__).resolve().parents[2]
    files = [p for name in ("infer", "backends") for p in (root / name).rglob("*") if p.suffix in _CODE]
    return _digest(*(hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(files)))


_CODE = {".py", ".cpp", ".cc", ".h", ".hpp", ".cu"}


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
