"""Weights on disk, one tensor at a time: the protocol that quantizing and loading read through."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ...errors import SourceError
from ...regular_files import open_regular
from .file_blocks import BLOCK_BYTES, FileBlocks, Piece, raw_bytes, row_blocks
from .in_memory import DictReader


class WeightReader(Protocol):
    """Named tensors in a checkpoint. Nothing is resident until it is read, and nothing stays after."""

    def names(self) -> list[str]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> Tensor:
        """The whole tensor in memory of its own."""
        ...

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `start:stop` of dimension 0, in memory of their own."""
        ...


@runtime_checkable
class MappableReader(Protocol):
    """A reader that also knows where each tensor lies, so that it can be mapped instead of read."""

    def piece(self, name: str) -> Piece | None:
        """File, byte offset, dtype and shape of a contiguous tensor; None when it can't be mapped."""
        ...


def non_finite(tensor: Tensor) -> int:
    """How many NaN or infinite values; 0 for integers. One pass over memory when there are none."""
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
    """Another reader, refusing NaN and infinity in whatever is read."""

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

    def piece(self, name: str) -> Piece | None:
        return self.inner.piece(name) if isinstance(self.inner, MappableReader) else None


def num_bytes(
    reader: WeightReader, names: Iterable[str] | None = None, dtype: torch.dtype | None = None
) -> int:
    """Bytes of these tensors (all by default) as stored, or with floats as `dtype`."""
    total = 0
    for name in reader.names() if names is None else names:
        stored = reader.dtype(name)
        kind = dtype if dtype is not None and stored.is_floating_point else stored
        total += torch.Size(reader.shape(name)).numel() * kind.itemsize
    return total


def stream(reader: WeightReader, name: str, limit: int = BLOCK_BYTES) -> Iterator[tuple[int, Tensor]]:
    """`(first row, rows)` of a tensor in blocks of at most `limit` bytes; a scalar comes whole, at row 0."""
    shape = reader.shape(name)
    if not shape:
        yield 0, reader.read(name)
        return
    for start, stop in row_blocks(shape, reader.dtype(name).itemsize, limit):
        yield start, reader.rows(name, start, stop)


def read_as(reader: WeightReader, name: str, dtype: torch.dtype) -> Tensor:
    """The tensor as `dtype`, read and cast block by block: one block above the result."""
    out = torch.empty(reader.shape(name), dtype=dtype)
    for start, block in stream(reader, name):
        if out.ndim == 0:
            return block.to(dtype)
        out[start : start + block.shape[0]] = block
    return out


def open_reader(path: Path) -> WeightReader:
    """A safetensors file, its index json, or a torch zip, by content; raises `SourceError` otherwise."""
    from .safetensors_reader import SafetensorsReader
    from .torch_reader import TorchReader

    with open_regular(path) as file:
        head = file.read(4)
    return TorchReader(path) if head == b"PK\x03\x04" else SafetensorsReader(path)


__all__ = [
    "BLOCK_BYTES",
    "DictReader",
    "FileBlocks",
    "FiniteReader",
    "MappableReader",
    "Piece",
    "WeightReader",
    "check_finite",
    "non_finite",
    "num_bytes",
    "open_reader",
    "raw_bytes",
    "read_as",
    "row_blocks",
    "stream",
]
