"""Memory-mapped weights: one private mapping per file, tensors as views of it."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from ..weights import (
    BLOCK_BYTES,
    FileBlocks,
    FileExtent,
    Weight,
    check_finite,
    raw_bytes,
    row_blocks,
)


class MappedLoader:
    """Values as mapped views where dtype and alignment allow, else of copies; counts both in bytes."""

    def __init__(self) -> None:
        self.mapped = self.copied = 0
        self._storages: dict[Path, torch.UntypedStorage] = {}
        self._files: dict[Path, FileBlocks] = {}
        self._scratch = torch.empty(BLOCK_BYTES, dtype=torch.uint8)

    def __call__(self, name: str, weight: Weight, dtype: torch.dtype) -> Tensor:
        extent = weight.extent
        if extent is None or extent.dtype != dtype or extent.offset % dtype.itemsize or extent.num_bytes == 0:
            tensor = weight.read_as(dtype)
            self.copied += tensor.numel() * tensor.element_size()
            return tensor
        self._check(name, extent)
        self.mapped += extent.num_bytes
        return view(self._storage(extent.path), extent)

    def summary(self) -> str:
        mapped = f"{self.mapped / 1e6:.1f} MB mapped from the file"
        return f"{mapped}, {self.copied / 1e6:.1f} MB copied (cast or not aligned)" if self.copied else mapped

    def _check(self, name: str, extent: FileExtent) -> None:
        """Raise `SourceError` for NaN and infinity, by `pread` into one buffer: mapped pages stay non-resident.

        Blocks allocated one by one would be pinned in malloc's heap by what is allocated between them.
        """
        shape = extent.shape or (1,)
        row_bytes = extent.num_bytes // shape[0]
        file = self._files.setdefault(extent.path, FileBlocks(extent.path))
        for start, stop in row_blocks(shape, extent.dtype.itemsize):
            size = (stop - start) * row_bytes
            if size > self._scratch.numel():
                self._scratch = torch.empty(size, dtype=torch.uint8)
            part = self._scratch[:size]
            file.read_into(raw_bytes(part), extent.offset + start * row_bytes)
            rows = part.view(extent.dtype).view(stop - start, *shape[1:])
            check_finite(name, rows, str(extent.path), row=start)

    def _storage(self, path: Path) -> torch.UntypedStorage:
        if path not in self._storages:
            # Private: a write to a weight copies its page and never reaches the file.
            mapped = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)
            self._storages[path] = cast(torch.UntypedStorage, mapped)
        return self._storages[path]


def view(storage: torch.UntypedStorage, extent: FileExtent) -> Tensor:
    """Return the tensor at the extent's place in the mapped file; memory is shared."""
    stride = torch.empty(extent.shape, device="meta").stride()
    empty = torch.empty(0, dtype=extent.dtype)
    return empty.set_(storage, extent.offset // extent.dtype.itemsize, extent.shape, stride)
