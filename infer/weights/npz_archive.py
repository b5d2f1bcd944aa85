"""Weights in a NumPy archive (.npz): numbers only, nothing pickled."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch

from ..errors import SourceError
from . import Weight, in_memory

MAX_RATIO = 200  # of the arrays to the file: more is a decompression bomb, no weights


def read_npz(path: Path) -> dict[str, Weight]:
    """Read all arrays into memory; raise `SourceError` for pickled objects, other dtypes and compression bombs."""
    with zipfile.ZipFile(path) as file:
        total = sum(member.file_size for member in file.infolist())
    if total > MAX_RATIO * path.stat().st_size:
        raise SourceError(
            f"the archive expands to {total} bytes, more than {MAX_RATIO} times its size", where=str(path)
        )
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        return in_memory({name: torch.from_numpy(value) for name, value in arrays.items()})
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise SourceError(f"NumPy can't read it without pickle: {error}", where=str(path)) from error
    except TypeError as error:
        raise SourceError(f"it holds arrays that are no numbers: {error}", where=str(path)) from error
