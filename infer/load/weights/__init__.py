"""Weights on disk, one tensor at a time: the mapping that loading and quantizing use."""

from __future__ import annotations

from pathlib import Path

from ...regular_files import open_regular
from .checkpoint import (
    Checkpoint,
    StoredCodes,
    Weight,
    check_finite,
    finite,
    in_memory,
    joined,
    non_finite,
    num_bytes,
)
from .file_blocks import BLOCK_BYTES, FileBlocks, FileExtent, raw_bytes, row_blocks


def open_weight_file(path: Path) -> Checkpoint:
    """Open a safetensors file, its index JSON or a torch zip, by content; raise `SourceError` otherwise."""
    from .safetensors_file import open_safetensors
    from .torch_file import open_torch

    with open_regular(path) as file:
        head = file.read(4)
    return open_torch(path).weights if head == b"PK\x03\x04" else open_safetensors(path).weights


__all__ = [
    "BLOCK_BYTES",
    "Checkpoint",
    "FileBlocks",
    "FileExtent",
    "StoredCodes",
    "Weight",
    "check_finite",
    "finite",
    "in_memory",
    "joined",
    "non_finite",
    "num_bytes",
    "open_weight_file",
    "raw_bytes",
    "row_blocks",
]
