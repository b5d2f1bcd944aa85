"""Tensors of a GGUF file by transformers' names: blocks decoded row by row, rows in transformers' order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..weights.file_blocks import FileBlocks, FileExtent
from ..weights.stored_codes import StoredCodes
from .block_codes import split_blocks
from .header import GgufTensor


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as transformers names it, in the rows of one in the file.

    `first`: its first row there; `order` int64 [rows]: where each of its rows lies after that, None in sequence;
    `subtracted`: what the converter had added to each value.
    """

    tensor: GgufTensor
    shape: tuple[int, ...]
    first: int = 0
    order: Tensor | None = None
    subtracted: float = 0.0

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.type.dtype

    def extent(self) -> FileExtent | None:
        """Return the extent in the file where it holds the values as they are, else None."""
        if self.tensor.type.decode is not None or self.order is not None or self.subtracted:
            return None
        offset = self.tensor.offset + self.first * self.tensor.row_bytes
        return FileExtent(self.tensor.path, offset, self.dtype, self.shape)


class GgufReader:
    """Reader of the tensors that `stored` names; block types are read as float32."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self._stored = dict(stored)
        self._files = {path: FileBlocks(path) for path in {one.tensor.path for one in stored.values()}}

    def names(self) -> list[str]:
        return list(self._stored)

    def dtype(self, name: str) -> torch.dtype:
        return self._stored[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name].shape

    def extent(self, name: str) -> FileExtent | None:
        return self._stored[name].extent()

    def read(self, name: str) -> Tensor:
        return self.rows(name, 0, self._stored[name].shape[0])

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows `start:stop` of dimension 0; of a vector, its elements."""
        stored = self._stored[name]
        stop = min(stop, stored.shape[0])
        if stop <= start:
            return torch.empty((0, *stored.shape[1:]), dtype=stored.dtype)
        if len(stored.tensor.shape) == 1:
            values = self._decoded(stored, 0, 1).reshape(stored.shape)[start:stop]
        elif stored.order is None:
            per = max(torch.Size(stored.shape[1:-1]).numel(), 1)
            values = self._decoded(stored, start * per, stop * per)
        else:
            rows = stored.order[start:stop]
            low = int(rows.min())
            values = self._decoded(stored, low, int(rows.max()) + 1)[rows - low]
        values = values.reshape(stop - start, *stored.shape[1:])
        return values - stored.subtracted if stored.subtracted else values.clone()

    def _decoded(self, stored: StoredTensor, start: int, stop: int) -> Tensor:
        """Read rows of the file's tensor: [stop - start, its innermost size]."""
        kind, width = stored.tensor.type, stored.tensor.shape[-1]
        offset = stored.tensor.offset + (stored.first + start) * stored.tensor.row_bytes
        file = self._files[stored.tensor.path]
        if kind.decode is None:
            return file.tensor(kind.dtype, (stop - start, width), offset)
        blocks = (stop - start) * width // kind.block
        raw = file.tensor(torch.uint8, (blocks, kind.num_bytes), offset)
        return kind.decode(raw).reshape(stop - start, width)

    def codes(self, name: str) -> StoredCodes | None:
        """Return the codes of a matrix of a block type; None for values stored in float."""
        stored = self._stored[name]
        kind, width = stored.tensor.type, stored.tensor.shape[-1]
        if kind.decode is None or len(stored.shape) != 2 or stored.subtracted:
            return None

        def rows(start: int, stop: int) -> dict[str, Tensor]:
            wanted = torch.arange(start, stop) if stored.order is None else stored.order[start:stop]
            low, high = int(wanted.min()), int(wanted.max()) + 1
            offset = stored.tensor.offset + (stored.first + low) * stored.tensor.row_bytes
            blocks = width // kind.block
            file = self._files[stored.tensor.path]
            raw = file.tensor(torch.uint8, (high - low, blocks * kind.num_bytes), offset)
            raw = raw[wanted - low].reshape(-1, kind.num_bytes)
            return split_blocks(kind, raw, stop - start)

        return StoredCodes(kind.name, (stored.shape[0], width), rows)


def rotary_order(rows: int, heads: int) -> Tensor:
    """Return where llama.cpp stores each row of q or k, int64 [rows].

    Its rotary embedding turns neighbours, transformers' the two halves of a head: row i of the first half of a head
    lies at 2i, row i of the second at 2i + 1.
    """
    stored = torch.arange(rows).reshape(heads, -1, 2)
    return stored.transpose(1, 2).reshape(rows)


def expert_slices(name: str, stored: StoredTensor) -> dict[str, StoredTensor]:
    """Split a tensor of all experts [experts, out, in] into one for each; `name` has {} for its number."""
    experts, *inner = stored.shape
    rows = torch.Size(inner[:-1]).numel()
    return {
        name.format(number): replace(stored, shape=tuple(inner), first=number * rows)
        for number in range(experts)
    }


def shard_paths(path: Path, count: int, number: int) -> list[Path]:
    """Return the files of a split model, `NAME-00001-of-0000N.gguf`, of which `path` is the one of `number`, from 0."""
    ending = f"-{number + 1:05d}-of-{count:05d}.gguf"
    if not path.name.endswith(ending):
        return []
    stem = path.name.removesuffix(ending)
    return [path.with_name(f"{stem}-{one:05d}-of-{count:05d}.gguf") for one in range(1, count + 1)]
