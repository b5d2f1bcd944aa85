"""Tensors of a GGUF file by transformers' names: blocks decoded row by row, rows in transformers' order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ...weights import StoredCodes, Weight
from ...weights.file_blocks import FileBlocks, FileExtent
from .block_types import BlockType
from .header import GgufTensor


@dataclass(frozen=True)
class RenamedTensor:
    """A tensor as transformers names it, of rows of tensors in the file that are alike in shape and type.

    A row has the innermost size of the file's tensor; one element is a row of a vector. Row r is row r // n of part
    r % n of n `parts`. `first`: the tensor's first row; `order` int64 [rows]: where each of its rows lies after that,
    None in sequence; `subtracted`: what the converter had added to each value; `by_columns`: experts [experts, K, N]
    whose rows are their columns, or their biases [experts, N].
    """

    parts: tuple[GgufTensor, ...]
    shape: tuple[int, ...]
    first: int = 0
    order: Tensor | None = None
    subtracted: float = 0.0
    by_columns: bool = False

    @property
    def type(self) -> BlockType:
        return self.parts[0].type

    @property
    def width(self) -> int:
        """Values of a row."""
        of_vectors = len(self.shape) == (2 if self.by_columns else 1)
        return 1 if of_vectors else self.parts[0].shape[-1]

    @property
    def num_rows(self) -> int:
        return torch.Size(self.shape).numel() // self.width

    def extent(self) -> FileExtent | None:
        """Return the extent in the file where it holds the values as they are, else None."""
        if self.type.holds_codes or self.order is not None or self.subtracted or self.by_columns:
            return None
        tensor = self.parts[0]
        offset = tensor.offset + self.first * self.type.row_bytes(self.width)
        return FileExtent(tensor.path, offset, self.type.dtype, self.shape)

    def weight(self, files: Mapping[Path, FileBlocks]) -> Weight:
        """Return it as it is read of the open files."""
        kind, width = self.type, self.width

        def rows(start: int, stop: int) -> Tensor:
            each = self.num_rows // self.shape[0]
            raw = self._raw_rows(files, start * each, stop * each)
            coded = kind.holds_codes
            values = kind.decode(raw.reshape(-1, kind.num_bytes)) if coded else raw.view(kind.dtype)
            if self.by_columns and len(self.shape) == 3:
                return values.reshape(stop - start, each, width).transpose(1, 2).contiguous()
            values = values.reshape(stop - start, *self.shape[1:])
            return values - self.subtracted if self.subtracted else values

        def rows_of_codes(start: int, stop: int) -> dict[str, Tensor]:
            raw = self._raw_rows(files, start, stop)
            return kind.rows(raw.reshape(-1, kind.num_bytes), stop - start)

        def codes() -> StoredCodes | None:
            """Return the codes of a matrix of a block type, or of the rows of experts; None for others."""
            matrix = len(self.shape) == (3 if self.by_columns else 2)
            if not kind.holds_codes or not matrix or self.subtracted:
                return None
            shape = (self.num_rows, width)
            return StoredCodes(kind.name, shape, rows_of_codes, experts=self.by_columns)

        return Weight(kind.dtype, self.shape, rows, self.extent(), codes)

    def _raw_rows(self, files: Mapping[Path, FileBlocks], start: int, stop: int) -> Tensor:
        """Read the bytes of rows: uint8 [stop - start, bytes of a row]. Rows of an order lie near each other."""

        def read(tensor: GgufTensor, low: int, high: int) -> Tensor:
            size = self.type.row_bytes(self.width)
            return files[tensor.path].tensor(torch.uint8, (high - low, size), tensor.offset + low * size)

        if self.order is None and len(self.parts) == 1:
            return read(self.parts[0], self.first + start, self.first + stop)
        wanted = self.first + (torch.arange(start, stop) if self.order is None else self.order[start:stop])
        number, row = wanted % len(self.parts), wanted // len(self.parts)
        found, places = [], []
        for i in number.unique().tolist():
            places.append((number == i).nonzero().flatten())
            own = row[places[-1]]
            low = int(own.min())
            found.append(read(self.parts[i], low, int(own.max()) + 1).index_select(0, own - low))
        return found[0] if len(found) == 1 else torch.cat(found)[torch.cat(places).argsort()]


def open_tensors(stored: Mapping[str, RenamedTensor]) -> dict[str, Weight]:
    """Return the weights of the tensors that `stored` names; block types are read as float32."""
    paths = {tensor.path for held in stored.values() for tensor in held.parts}
    files = {path: FileBlocks(path) for path in paths}
    return {name: held.weight(files) for name, held in stored.items()}


def tensor_values(tensor: GgufTensor) -> list[float]:
    """Read a tensor of one dimension."""
    weight = open_tensors({"values": RenamedTensor((tensor,), tensor.shape)})["values"]
    return [float(value) for value in weight.read()]


def rotary_order(rows: int, heads: int) -> Tensor:
    """Return where llama.cpp stores each row of q or k, int64 [rows].

    Its rotary embedding turns neighbours, transformers' the two halves of a head: row i of the first half of a head
    lies at 2i, row i of the second at 2i + 1.
    """
    stored = torch.arange(rows).reshape(heads, -1, 2)
    return stored.transpose(1, 2).reshape(rows)


def expert_slices(name: str, stored: RenamedTensor) -> dict[str, RenamedTensor]:
    """Split a tensor of all experts [experts, out, in] into one for each; `name` has {} for its number."""
    experts, *inner = stored.shape
    one = replace(stored, shape=tuple(inner))
    return {name.format(number): replace(one, first=number * one.num_rows) for number in range(experts)}


def shard_paths(path: Path, count: int, number: int) -> list[Path]:
    """Return the files of a split model, `NAME-00001-of-0000N.gguf`, of which `path` is the one of `number`, from 0."""
    ending = f"-{number + 1:05d}-of-{count:05d}.gguf"
    if not path.name.endswith(ending):
        return []
    stem = path.name.removesuffix(ending)
    return [path.with_name(f"{stem}-{one:05d}-of-{count:05d}.gguf") for one in range(1, count + 1)]
