"""Weights that stay in the file: one private mapping per file, tensors as views of it."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from ..weights import MappableReader, Piece, WeightReader, read_as, stream


class Mapper:
    """Gives tensors as views of the mapped file where dtype and alignment allow, else copies; counts both."""

    def __init__(self, reader: WeightReader) -> None:
        self.reader = reader
        self.mapped = self.copied = 0
        self._storages: dict[Path, torch.UntypedStorage] = {}

    def __call__(self, name: str, dtype: torch.dtype) -> Tensor:
        piece = self.reader.piece(name) if isinstance(self.reader, MappableReader) else None
        if piece is None or piece.dtype != dtype or piece.offset % dtype.itemsize or piece.num_bytes == 0:
            tensor = read_as(self.reader, name, dtype)
            self.copied += tensor.numel() * tensor.element_size()
            return tensor
        # Checked through pread, so that the mapping's pages stay untouched and out of the resident set.
        for _ in stream(self.reader, name):
            pass
        self.mapped += piece.num_bytes
        return view(self._storage(piece.path), piece)

    def said(self) -> str:
        mapped = f"{self.mapped / 1e6:.1f} MB mapped from the file"
        return f"{mapped}, {self.copied / 1e6:.1f} MB copied (cast or not aligned)" if self.copied else mapped

    def _storage(self, path: Path) -> torch.UntypedStorage:
        if path not in self._storages:
            # Private: a write to a weight copies its page and never reaches the file.
            mapped = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)
            self._storages[path] = cast(torch.UntypedStorage, mapped)
        return self._storages[path]


def view(storage: torch.UntypedStorage, piece: Piece) -> Tensor:
    """The tensor that lies at the piece's place in the mapped file; shares memory with it."""
    stride = torch.empty(piece.shape, device="meta").stride()
    empty = torch.empty(0, dtype=piece.dtype)
    return empty.set_(storage, piece.offset // piece.dtype.itemsize, piece.shape, stride)
