"""Model repository: artifacts, folders of versions, and folders of those, all given at the start.

`NAME.infer/` is one model; `NAME/3/` is version 3 of NAME, `MODELS/NAME.infer/` and `MODELS/NAME/3/` are in a
folder of models. No other path is ever opened: clients send names, and a name is looked up here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from ..artifact.manifest import MANIFEST, MAX_BYTES
from ..errors import NotFoundError, SourceError
from ..regular_files import read_regular
from .limits import MODEL_NAME


class ModelLocation(msgspec.Struct, frozen=True, kw_only=True):
    """Path of an artifact; `name` and `version` None are taken from its manifest."""

    path: Path
    name: str | None = None
    version: str | None = None


class ModelRepository:
    """Models in the given paths, read from disk at each call."""

    def __init__(self, paths: Iterable[str | os.PathLike[str]]) -> None:
        self._paths = [Path(path).absolute() for path in paths]

    def latest(self) -> list[ModelLocation]:
        """Return the highest version of every model, in the order of the given paths.

        A path without an artifact is included: opening it raises the error.
        """
        chosen = []
        for path in self._paths:
            models = _models(path)
            chosen += [versions[-1] for versions in models] if models else [ModelLocation(path=path)]
        return chosen

    def all(self) -> list[tuple[str, str, ModelLocation]]:
        """Return (name, version, location) of every version, ascending."""
        found = [one for path in self._paths for versions in _models(path) for one in versions]
        return [(*name_and_version(one), one) for one in found]

    def find(self, name: str) -> ModelLocation:
        """Return a model's highest version; raise `NotFoundError`."""
        versions = [found for known, _, found in self.all() if known == name]
        if not versions:
            raise NotFoundError("no such model in the model repository")
        return versions[-1]


def name_and_version(found: ModelLocation) -> tuple[str, str]:
    """Return name and version; `?` for a manifest that can't be read."""
    if found.name is not None and found.version is not None:
        return found.name, found.version
    try:
        said = msgspec.json.decode(read_regular(found.path / MANIFEST, MAX_BYTES), type=dict)
        name, version = said.get("name", found.path.stem), said.get("version", "1")
        return found.name or str(name), str(version)
    except (SourceError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return found.name or found.path.stem, "?"


def _models(path: Path) -> list[list[ModelLocation]]:
    """Return the versions of each model at or in `path`."""
    if own := _versions(path):
        return [own]
    return [versions for folder in _folders(path) if (versions := _versions(folder))]


def _versions(path: Path) -> list[ModelLocation]:
    if (path / MANIFEST).is_file():
        return [ModelLocation(path=path)]
    numbered = [
        folder for folder in _folders(path) if folder.name.isdigit() and not folder.name.startswith("0")
    ]
    return [
        ModelLocation(path=folder, name=path.name, version=folder.name)
        for folder in sorted(numbered, key=lambda folder: int(folder.name))
        if (folder / MANIFEST).is_file() and MODEL_NAME.fullmatch(path.name)
    ]


def _folders(path: Path) -> Iterator[Path]:
    """Yield the subfolders by name, without hidden ones."""
    try:
        names: Sequence[Path] = sorted(path.iterdir())
    except OSError:
        return
    yield from (entry for entry in names if entry.is_dir() and not entry.name.startswith("."))
