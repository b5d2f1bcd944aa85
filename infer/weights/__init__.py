"""Checkpoints: mappings of names to weights on disk that are read when asked for, and the views of them.

Renamed, joined, decoded and checked checkpoints are new mappings of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import SourceError
from .file_blocks import BLOCK_BYTES, FileBlocks, FileExtent, row_blocks

Rows = Callable[[int, int], dict[str, Tensor]]


@dataclass(frozen=True)
class StoredCodes:
    """Codes of a weight [rows of outputs, columns], in the tensors of `kernels.ops.coded_weight`.

    `kind`: the source's name of the form (Q4_K, gptq); `rows(start, stop)`: the tensors of these rows, whole tables;
    `dtype`: to which the source's own reader rounds decoded weights; `experts`: the rows are those of one expert after
    another, whatever the order of the weight's dimensions; `order` int64 [columns]: where the column that each code
    belongs to lies in x, for codes sorted by group (act-order).
    `refused` is the reason why the codes can't be carried over; then `rows` may not be called.
    """

    kind: str
    shape: tuple[int, int]
    rows: Rows
    dtype: torch.dtype = torch.float32
    experts: bool = False
    order: Tensor | None = None
    refused: str = ""

    @classmethod
    def without(cls, kind: str, refused: str) -> StoredCodes:
        """Return codes of a weight without data, with the reason why they can't be carried over."""
        return cls(kind, (0, 0), lambda start, stop: {}, refused=refused)


def _stored_in_float() -> StoredCodes | None:
    return None


@dataclass(frozen=True)
class Weight:
    """Tensor of a checkpoint; nothing is resident until it is read, and nothing stays after.

    `read_rows(start, stop)` reads rows that there are of dimension 0 into memory of their own, a scalar whole. `extent`
    is where it lies contiguous in a file, so that it can be mapped. `codes()` gives the codes of a weight that its
    source has quantized, None for one in float.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read_rows: Callable[[int, int], Tensor]
    extent: FileExtent | None = None
    codes: Callable[[], StoredCodes | None] = _stored_in_float

    def rows(self, start: int, stop: int) -> Tensor:
        """Read rows of dimension 0, fewer where there are no more; a scalar whole."""
        stop = min(stop, self.shape[0]) if self.shape else 1
        if stop <= start:
            return torch.empty((0, *self.shape[1:]), dtype=self.dtype)
        return self.read_rows(start, stop)

    def read(self) -> Tensor:
        """Read the whole tensor into memory of its own."""
        return self.rows(0, self.shape[0] if self.shape else 1)

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def blocks(self, limit: int = BLOCK_BYTES) -> Iterator[tuple[int, Tensor]]:
        """Yield `(first row, rows)` in blocks of at most `limit` bytes; a scalar whole, at row 0."""
        if not self.shape:
            yield 0, self.read()
            return
        for start, stop in row_blocks(self.shape, self.dtype.itemsize, limit):
            yield start, self.rows(start, stop)

    def read_as(self, dtype: torch.dtype) -> Tensor:
        """Read the tensor as `dtype`, cast block by block: peak memory is the result and one block."""
        out = torch.empty(self.shape, dtype=dtype)
        for start, block in self.blocks():
            if out.ndim == 0:
                return block.to(dtype)
            out[start : start + block.shape[0]] = block
        return out


Checkpoint = Mapping[str, Weight]


def in_file(file: FileBlocks, extent: FileExtent) -> Weight:
    """Return the weight at an extent of `file`."""
    shape, dtype = extent.shape, extent.dtype
    row_bytes = torch.Size(shape[1:]).numel() * dtype.itemsize

    def rows(start: int, stop: int) -> Tensor:
        if not shape:
            return file.tensor(dtype, (), extent.offset)
        return file.tensor(dtype, (stop - start, *shape[1:]), extent.offset + start * row_bytes)

    return Weight(dtype, shape, rows, extent)


def in_memory(tensors: Mapping[str, Tensor]) -> dict[str, Weight]:
    """Return the checkpoint of a state dict; every read is a copy, as from a file."""
    return {name: _held(tensor.detach()) for name, tensor in tensors.items()}


def _held(tensor: Tensor) -> Weight:
    def rows(start: int, stop: int) -> Tensor:
        part = tensor[start:stop] if tensor.ndim else tensor
        return part.clone(memory_format=torch.contiguous_format)

    return Weight(tensor.dtype, tuple(tensor.shape), rows)


def joined(parts: Iterable[tuple[str, Checkpoint]]) -> dict[str, Weight]:
    """Join checkpoints, each name with the prefix of its own; raise `SourceError` when two have the same name."""
    whole: dict[str, Weight] = {}
    for prefix, checkpoint in parts:
        for name, weight in checkpoint.items():
            if prefix + name in whole:
                raise SourceError(
                    f"tensor {prefix + name!r} is in two checkpoints", hint="Leave one of the two out"
                )
            whole[prefix + name] = weight
    return whole


def finite(checkpoint: Checkpoint, where: str = "") -> dict[str, Weight]:
    """Return weights that raise `SourceError` for NaN and infinity in the data read."""
    return {name: _checked(name, weight, where) for name, weight in checkpoint.items()}


def _checked(name: str, weight: Weight, where: str) -> Weight:
    def rows(start: int, stop: int) -> Tensor:
        tensor = weight.rows(start, stop)
        check_finite(name, tensor, where, row=start)
        return tensor

    return replace(weight, read_rows=rows)


def num_bytes(
    checkpoint: Checkpoint, names: Iterable[str] | None = None, dtype: torch.dtype | None = None
) -> int:
    """Sum the bytes of these tensors (default: all) as stored, or with floats as `dtype`."""
    weights = checkpoint.values() if names is None else (checkpoint[name] for name in names)
    if dtype is None:
        return sum(weight.num_bytes for weight in weights)
    return sum(
        torch.Size(weight.shape).numel()
        * (dtype if weight.dtype.is_floating_point else weight.dtype).itemsize
        for weight in weights
    )


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
