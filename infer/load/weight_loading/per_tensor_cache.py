"""Cache of a checkpoint split into one file per tensor, in the dtype of the model."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from ...errors import ResourceError
from ...paths import cache
from ..weights import (
    BLOCK_BYTES,
    FileBlocks,
    FileExtent,
    MappableReader,
    WeightReader,
    num_bytes,
    raw_bytes,
    stream,
)


class SplitReader:
    """Reader of the tensors that `dtypes` names, each an aligned file that can be mapped."""

    def __init__(
        self, reader: WeightReader, dtypes: Mapping[str, torch.dtype], folder: Path | None = None
    ) -> None:
        self.inner = reader
        self.dtypes = {name: dtypes[name] for name in reader.names() if name in dtypes}
        self.folder = (folder or cache("tensors")) / self._key()
        self._index = {name: i for i, name in enumerate(self.dtypes)}
        if not self.folder.is_dir():
            self._buffer = bytearray(BLOCK_BYTES)
            self._split()
            del self._buffer

    def names(self) -> list[str]:
        return list(self.dtypes)

    def dtype(self, name: str) -> torch.dtype:
        return self.dtypes[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.inner.shape(name)

    def extent(self, name: str) -> FileExtent | None:
        return FileExtent(self.folder / f"{self._index[name]}.bin", 0, self.dtypes[name], self.shape(name))

    def read(self, name: str) -> Tensor:
        return self.inner.read(name).to(self.dtypes[name])

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        return self.inner.rows(name, start, stop).to(self.dtypes[name])

    def _key(self) -> str:
        """Return the cache key: a digest of files and times (or values, without a file) and dtypes."""
        digest = hashlib.sha256()
        for name, dtype in self.dtypes.items():
            digest.update(repr((name, str(dtype), self.inner.shape(name))).encode())
            extent = self.inner.extent(name) if isinstance(self.inner, MappableReader) else None
            if extent is not None:
                stat = extent.path.stat()
                stamp = (str(extent.path.resolve()), extent.offset, stat.st_size, stat.st_mtime_ns)
                digest.update(repr(stamp).encode())
                continue
            for _, block in stream(self.inner, name):
                digest.update(raw_bytes(block))
        return digest.hexdigest()[:24]

    def _split(self) -> None:
        parent = self.folder.parent
        parent.mkdir(parents=True, exist_ok=True)
        need = sum(num_bytes(self.inner, [name], dtype) for name, dtype in self.dtypes.items())
        free = shutil.disk_usage(parent).free
        if need > free:
            raise ResourceError(
                f"splitting needs {need / 1e9:.2f} GB, {free / 1e9:.2f} GB are free",
                where=str(parent),
                hint="Use --load meta, or point INFER_CACHE at a larger disk",
            )
        made = Path(tempfile.mkdtemp(dir=parent, prefix=".split-"))
        try:
            for name, index in self._index.items():
                with (made / f"{index}.bin").open("wb") as file:
                    self._copy(name, file)
            os.replace(made, self.folder)
        except OSError as error:
            if not self.folder.is_dir():
                raise ResourceError(f"the split could not be written: {error}", where=str(parent)) from error
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def _copy(self, name: str, file: IO[bytes]) -> None:
        extent = self.inner.extent(name) if isinstance(self.inner, MappableReader) else None
        if extent is None or extent.dtype != self.dtypes[name]:
            for _, block in stream(self.inner, name):
                file.write(raw_bytes(block.to(self.dtypes[name])))
            return
        # One buffer for all: blocks allocated anew left a quarter of the file behind in malloc's heap.
        source = FileBlocks(extent.path)
        for start in range(0, extent.num_bytes, BLOCK_BYTES):
            part = memoryview(self._buffer)[: min(BLOCK_BYTES, extent.num_bytes - start)]
            source.read_into(part, extent.offset + start)
            file.write(part)
        source.close()
