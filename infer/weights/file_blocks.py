"""Positioned reads (`pread`) of a file into private memory, so that no read data stays mapped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import IO, TYPE_CHECKING, cast

import torch
from torch import Tensor

from ..errors import SourceError

if TYPE_CHECKING:
    from typing_extensions import Buffer

BLOCK_BYTES = 16 << 20
# One read(2) moves at most 0x7ffff000 bytes on Linux.
READ_BYTES = 1 << 30


@dataclass(frozen=True)
class FileExtent:
    """Extent of a contiguous tensor in a file."""

    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a dense tensor; a contiguous one shares its memory."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(cast("Buffer", flat.numpy()))


def row_blocks(shape: tuple[int, ...], itemsize: int, limit: int = BLOCK_BYTES) -> Iterator[tuple[int, int]]:
    """Yield `(start, stop)` over dimension 0, each at most `limit` bytes but never less than one row."""
    row_bytes = max(torch.Size(shape[1:]).numel() * itemsize, 1)
    step = max(limit // row_bytes, 1)
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


class FileBlocks:
    """An open file that is read by offset; thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None
        self._lock = Lock()

    def size(self) -> int:
        return self.path.stat().st_size

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` from `offset`; raise `SourceError` when the file ends before."""
        done = 0
        while done < len(view):
            got = self._read_some(view[done : done + READ_BYTES], offset + done)
            if got == 0:
                raise SourceError(
                    f"expected {len(view)} bytes at offset {offset}, got {done}: the file is cut off",
                    where=str(self.path),
                    hint="It was truncated or changed while being read: copy it again",
                )
            done += got

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Tensor:
        """Read the tensor stored row-major at `offset` into memory of its own."""
        out = torch.empty(shape, dtype=dtype)
        if out.numel():
            self.read_into(raw_bytes(out), offset)
        return out

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file = None

    def _read_some(self, view: memoryview, offset: int) -> int:
        file = self._open()
        if hasattr(os, "preadv"):
            return os.preadv(file.fileno(), [view], offset)
        with self._lock:
            file.seek(offset)
            return int(file.readinto(view))  # type: ignore[attr-defined]

    def _open(self) -> IO[bytes]:
        with self._lock:
            if self._file is None:
                self._file = self.path.open("rb", buffering=0)
            return self._file

    def __del__(self) -> None:
        self.close()
