"""Artifacts of the best trials of a search, kept for the same search again: `<cache>/search/artifacts/SOURCE/TRIAL`.

The journal says what a trial measured; with its artifact it can be timed once more, and published, without being made.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from .. import paths
from ..artifact import store
from ..errors import InferError
from ..report.search_record import Candidate
from .journal import Journal

MOST_BYTES = 1 << 30  # of all kept artifacts of this user


class KeptArtifacts:
    """Artifacts of the trials of `source`, under the keys of `journal`."""

    def __init__(
        self, source: str, journal: Journal, root: Path | None = None, room: int = MOST_BYTES
    ) -> None:
        self._root = root or default_root()
        self._folder, self._journal, self._room = self._root / _name(source), journal, room

    def keep(self, artifacts: Iterable[tuple[Candidate, Path]]) -> None:
        """Link these artifacts into the cache, the last ones first to be deleted when it is full.

        What is larger than the room is left out. A disk that is full costs the resuming and nothing else.
        """
        with contextlib.suppress(OSError):
            for candidate, path in reversed(list(artifacts)):
                place = self._folder / self._journal.key(candidate)
                if place.exists():
                    os.utime(place)
                elif store.size(path) <= self._room:
                    _link_tree(path, place / path.name)
            self._make_room()

    def restore(self, candidate: Candidate, work: Path) -> Path | None:
        """Link the artifact of a trial into a folder of its own below `work`, verified; None where there is none."""
        key = self._journal.key(candidate)
        kept = next((self._folder / key).glob("*"), None)
        if kept is None:
            return None
        made = work / f"kept-{key[:16]}" / kept.name
        try:
            _link_tree(kept, made)
            store.verify(made, store.read_manifest(made))
            if store.signed_here(made):
                return made
        except (OSError, InferError):
            pass
        for folder in (made.parent, kept.parent):
            shutil.rmtree(folder, ignore_errors=True)
        return None

    def _make_room(self) -> None:
        """Delete the oldest artifacts of all sources until those left take no more than the room."""
        kept = sorted(self._root.glob("*/*"), key=lambda folder: folder.stat().st_mtime, reverse=True)
        used = 0
        for folder in kept:
            used += store.size(folder)
            if used > self._room:
                shutil.rmtree(folder, ignore_errors=True)


def delete_others(artifacts: dict[Candidate, Path], kept: set[Candidate]) -> None:
    """Delete the artifacts that can't win any more, so that the disk holds the front and no more."""
    for candidate in [one for one in artifacts if one not in kept]:
        shutil.rmtree(artifacts.pop(candidate).parent, ignore_errors=True)


def default_root() -> Path:
    return paths.cache("search") / "artifacts"


def forget(source: str | None = None, root: Path | None = None) -> None:
    """Delete the kept artifacts of a source, or all."""
    folder = root or default_root()
    shutil.rmtree(folder if source is None else folder / _name(source), ignore_errors=True)


def _name(source: str) -> str:
    return hashlib.sha256(os.path.abspath(source).encode()).hexdigest()[:16]


def _link_tree(source: Path, place: Path) -> None:
    """Make a tree of hard links, an artifact being never edited, or of copies on another file system.

    The tree is there as a whole or not at all.
    """
    try:
        shutil.copytree(source, place, copy_function=_link)
    except OSError:
        shutil.rmtree(place.parent, ignore_errors=True)
        raise


def _link(source: str, place: str) -> None:
    try:
        os.link(source, place)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
            raise
        shutil.copy2(source, place)
