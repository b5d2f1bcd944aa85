"""Index of a sharded checkpoint (`*.index.json`): which file holds which tensor."""

from __future__ import annotations

import json
from pathlib import Path

from ..errors import SourceError
from ..regular_files import read_regular

MAX_INDEX = 100_000_000  # bytes


def weight_map(index: Path) -> dict[str, str]:
    """Return the file name of each tensor that an index lists; raise `SourceError` for anything but an index."""
    try:
        content = json.loads(read_regular(index, MAX_INDEX))
    except (ValueError, RecursionError) as error:
        raise SourceError(f"the index is not JSON: {error}", where=str(index)) from error
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
        raise SourceError("expected an index with 'weight_map': {tensor: file}", where=str(index))
    return files


def shards(index: Path) -> list[Path]:
    """List the files that an index names; raise `SourceError` for one that does not lie beside it."""
    names = sorted(set(weight_map(index).values()))
    for name in names:
        if Path(name).name != name or not (index.parent / name).is_file():
            raise SourceError(
                f"the index names a shard {name!r} that is not beside it",
                where=str(index),
                hint="Download the folder again, whole",
            )
    return [index.parent / name for name in names]
