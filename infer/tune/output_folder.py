"""Folder that a training run writes: made beside its final name and renamed, so that it is whole or not there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import BusyError
from ..paths import writing


def require_free(output: Path, mark: str, *, replace: bool) -> None:
    """Raise `BusyError` where the folder exists, unless it is to be replaced and holds the file `mark` of its kind."""
    if not output.exists():
        return
    if not replace:
        raise BusyError(f"{output} exists", hint="Choose another --output, or replace it with --force")
    if not (output / mark).is_file():
        raise BusyError(
            f"{output} exists and has no {mark}, so it is not replaced", hint="Choose another --output"
        )


@contextmanager
def publish_folder(output: Path) -> Iterator[Path]:
    """Give a folder beside the output, which becomes the output at the end and is removed when an error is raised."""
    folder = output.with_name(f".{output.name}.tmp")
    shutil.rmtree(folder, ignore_errors=True)
    with writing(output):
        folder.mkdir(parents=True)
    try:
        yield folder
        if output.exists():
            shutil.rmtree(output)
        folder.rename(output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
