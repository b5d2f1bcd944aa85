"""The list of published files."""

from __future__ import annotations

from bench.real import measurements, pictures, recordings
from bench.real.published_file import PublishedFile

FILES: tuple[PublishedFile, ...] = (*pictures.FILES, *recordings.FILES, *measurements.FILES)


def named(name: str) -> PublishedFile:
    """Return a file by its name in the table."""
    return next(entry for entry in FILES if entry.name == name)
