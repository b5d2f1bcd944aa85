"""Tensors of a GGUF file by transformers' names: blocks decoded row by row, rows in transformers' order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ...weights import StoredCodes, Weight
from ...weights.file_blocks import FileBlocks, FileExtent
from .expert_stack import ExpertStack
from .header import GgufTensor


@dataclass(frozen=True)
class RenamedTensor:
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
        if self.tensor.type.holds_codes or self.order is not None or self.subtracted:
            return None
        offset = self.tensor.offset + self.first * self.tensor.row_bytes
        return FileExtent(self.tensor.path, offset, self.dtype, self.shape)


def open_tensors(stored: Mapping[str, RenamedTensor | ExpertStack]) -> dict[str, Weight]:
    """Return the weights of the tensors that `stored` names; block types are read as float32."""
    files: dict[Path, FileBlocks] = {}
    for tensor in (part for held in stored.values() for part in _parts(held)):
        files.setdefault(tensor.path, FileBlocks(tensor.path))
    return {
        name: _stacked(held, files) if isinstance(held, ExpertStack) else _renamed(held, files)
        for name, held in stored.items()
    }


def _parts(held: RenamedTensor | ExpertStack) -> tuple[GgufTensor, ...]:
    return held.parts if isinstance(held, ExpertStack) else (held.tensor,)


def _renamed(stored: RenamedTensor, files: Mapping[Path, FileBlocks]) -> Weight:
    tensor, shape = stored.tensor, stored.shape
    kind, width = tensor.type, tensor.shape[-1]

    def decoded(start: int, stop: int) -> Tensor:
        return _decoded(tensor, files, stored.first + start, stored.first + stop)

    def rows(start: int, stop: int) -> Tensor:
        """Read rows `start:stop` of dimension 0; of a vector, its elements."""
        if len(tensor.shape) == 1:
            values = decoded(0, 1).reshape(shape)[start:stop]
        elif stored.order is None:
            per = max(torch.Size(shape[1:-1]).numel(), 1)
            values = decoded(start * per, stop * per)
        else:
            places = stored.order[start:stop]
            low = int(places.min())
            values = decoded(low, int(places.max()) + 1)[places - low]
        values = values.reshape(stop - start, *shape[1:])
        return values - stored.subtracted if stored.subtracted else values.clone()

    def rows_of_codes(start: int, stop: int) -> dict[str, Tensor]:
        wanted = torch.arange(start, stop) if stored.order is None else stored.order[start:stop]
        raw = _raw_rows(tensor, files, wanted + stored.first)
        return kind.rows(raw.reshape(-1, kind.num_bytes), stop - start)

    def codes() -> StoredCodes | None:
        """Return the codes of a matrix of a block type; None for values stored in float."""
        if not kind.holds_codes or len(shape) != 2 or stored.subtracted:
            return None
        return StoredCodes(kind.name, (shape[0], width), rows_of_codes)

    return Weight(stored.dtype, shape, rows, stored.extent(), codes)


def _stacked(stack: ExpertStack, files: Mapping[Path, FileBlocks]) -> Weight:
    kind = stack.parts[0].type

    def experts(start: int, stop: int) -> Tensor:
        """Read experts `start:stop` of a stack."""
        parts = []
        for tensor in stack.parts:
            per = torch.Size(tensor.shape[1:-1]).numel()
            whole = _decoded(tensor, files, start * per, stop * per)
            parts.append(whole.reshape(stop - start, *tensor.shape[1:]))
        return stack.join(parts)

    def codes() -> StoredCodes | None:
        """Return the codes of experts [experts * rows, K]; None for values stored in float."""
        if not kind.holds_codes or len(stack.shape) != 3:
            return None
        count, columns, rows = stack.shape

        def read(start: int, stop: int) -> dict[str, Tensor]:
            raw = torch.empty((stop - start, kind.row_bytes(columns)), dtype=torch.uint8)
            for tensor, wanted, places in stack.sources(start, stop):
                if len(wanted):
                    raw[places] = _raw_rows(tensor, files, wanted)
            return kind.rows(raw.reshape(-1, kind.num_bytes), stop - start)

        return StoredCodes(kind.name, (count * rows, columns), read, experts=True)

    return Weight(stack.dtype, stack.shape, experts, codes=codes)


def _raw_rows(tensor: GgufTensor, files: Mapping[Path, FileBlocks], wanted: Tensor) -> Tensor:
    """Read the bytes of flat rows `wanted` int64 [n], which lie near each other: uint8 [n, bytes of a row]."""
    low, high = int(wanted.min()), int(wanted.max()) + 1
    size = tensor.row_bytes
    raw = files[tensor.path].tensor(torch.uint8, (high - low, size), tensor.offset + low * size)
    return raw[wanted - low]


def _decoded(tensor: GgufTensor, files: Mapping[Path, FileBlocks], start: int, stop: int) -> Tensor:
    """Read flat rows of the file's tensor: [stop - start, its innermost size]."""
    kind, width = tensor.type, tensor.shape[-1]
    offset, file = tensor.offset + start * tensor.row_bytes, files[tensor.path]
    if not kind.holds_codes:
        return file.tensor(kind.dtype, (stop - start, width), offset)
    blocks = (stop - start) * width // kind.block
    raw = file.tensor(torch.uint8, (blocks, kind.num_bytes), offset)
    return kind.decode(raw).reshape(stop - start, width)


def tensor_values(tensor: GgufTensor) -> list[float]:
    """Read a tensor of one dimension."""
    weight = open_tensors({"values": RenamedTensor(tensor, tensor.shape)})["values"]
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
