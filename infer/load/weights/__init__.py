"""Readers of weights on disk, one tensor at a time: the protocol that loading and quantizing use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ...errors import SourceError
from ...regular_files import open_regular
from .file_blocks import BLOCK_BYTES, FileBlocks, FileExtent, raw_bytes, row_blocks
from .in_memory import DictReader
from .stored_codes import CodesReader, StoredCodes, stored_codes


class WeightReader(Protocol):
    """Named tensors in a checkpoint; nothing is resident until it is read, and nothing stays after."""

    def names(self) -> list[str]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> Tensor:
        """Read the whole tensor into memory of its own."""
        ...

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows `start:stop` of dimension 0 into memory of their own."""
        ...


@runtime_checkable
class MappableReader(Protocol):
    """Reader that also knows the file extent of each tensor, so that it can be mapped."""

    def extent(self, name: str) -> FileExtent | None:
        """Return the file extent of a contiguous tensor; None when it can't be mapped."""
        ...


def non_finite(tensor: Tensor) -> int:
    """Count NaN and infinite values; 0 for integers. One pass over memory when there are none."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return 0
    values = tensor if tensor.element_size() > 1 else tensor.float()
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    if bool(torch.isfinite(values.sum(dtype=wide))):
        return 0
    return values.numel() - int(torch.isfinite(values).sum())


def check_finite(name: str, tensor: Tensor, where: str = "", *, row: int = 0) -> None:
    """Raise `SourceError` naming the tensor when it holds NaN or infinity. `row` is where a block starts."""
    bad = non_finite(tensor)
    if bad:
        part = f" in rows {row} to {row + tensor.shape[0]}" if row or tensor.ndim > 1 else ""
        raise SourceError(
            f"expected finite weights, got {bad} NaN or infinite values{part} of {name!r}",
            where=where,
            hint="The checkpoint is damaged, or training diverged: take an earlier one",
        )


class FiniteReader:
    """Reader that raises `SourceError` for NaN and infinity in the data read from another one."""

    def __init__(self, reader: WeightReader, where: str = "") -> None:
        self.inner, self.where = reader, where

    def names(self) -> list[str]:
        return self.inner.names()

    def dtype(self, name: str) -> torch.dtype:
        return self.inner.dtype(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.inner.shape(name)

    def read(self, name: str) -> Tensor:
        tensor = self.inner.read(name)
        check_finite(name, tensor, self.where)
        return tensor

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        tensor = self.inner.rows(name, start, stop)
        check_finite(name, tensor, self.where, row=start)
        return tensor

    def extent(self, name: str) -> FileExtent | None:
        return self.inner.extent(name) if isinstance(self.inner, MappableReader) else None

    def codes(self, name: str) -> StoredCodes | None:
        return stored_codes(self.inner, name)


def num_bytes(
    reader: WeightReader, names: Iterable[str] | None = None, dtype: torch.dtype | None = None
) -> int:
    """Sum the bytes of these tensors (default: all) as stored, or with floats as `dtype`."""
    total = 0
    for name in reader.names() if names is None else names:
        stored = reader.dtype(name)
        kind = dtype if dtype is not None and stored.is_floating_point else stored
        total += torch.Size(reader.shape(name)).numel() * kind.itemsize
    return total


def stream(reader: WeightReader, name: str, limit: int = BLOCK_BYTES) -> Iterator[tuple[int, Tensor]]:
    """Yield `(first row, rows)` of a tensor in blocks of at most `limit` bytes; a scalar whole, at row 0."""
    shape = reader.shape(name)
    if not shape:
        yield 0, reader.read(name)
        return
    for start, stop in row_blocks(shape, reader.dtype(name).itemsize, limit):
        yield start, reader.rows(name, start, stop)


def read_as(reader: WeightReader, name: str, dtype: torch.dtype) -> Tensor:
    """Read a tensor as `dtype`, cast block by block: peak memory is the result and one block."""
    out = torch.empty(reader.shape(name), dtype=dtype)
    for start, block in stream(reader, name):
        if out.ndim == 0:
            return block.to(dtype)
        out[start : start + block.shape[0]] = block
    return out


def open_reader(path: Path) -> WeightReader:
    """Open a safetensors file, its index JSON or a torch zip, by content; raise `SourceError` otherwise."""
    from .safetensors_reader import SafetensorsReader
    from .torch_reader import TorchReader

    with open_regular(path) as file:
        head = file.read(4)
    return TorchReader(path) if head == b"PK\x03\x04" else SafetensorsReader(path)


__all__ = [
    "BLOCK_BYTES",
    "CodesReader",
    "DictReader",
    "FileBlocks",
    "FiniteReader",
    "MappableReader",
    "FileExtent",
    "StoredCodes",
    "WeightReader",
    "check_finite",
    "non_finite",
    "num_bytes",
    "open_reader",
    "raw_bytes",
    "read_as",
    "row_blocks",
    "stored_codes",
    "stream",
]
