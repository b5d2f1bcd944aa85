"""Tensors of a GGUF file by transformers' names: blocks decoded row by row, rows in transformers' order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..weights.file_blocks import FileBlocks, FileExtent
from ..weights.stored_codes import StoredCodes
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


class GgufReader:
    """Reader of the tensors that `stored` names; block types are read as float32."""

    def __init__(self, stored: Mapping[str, RenamedTensor | ExpertStack]) -> None:
        self._stored = {name: one for name, one in stored.items() if isinstance(one, RenamedTensor)}
        self._stacks = {name: one for name, one in stored.items() if isinstance(one, ExpertStack)}
        self._names = list(stored)
        tensors = [one.tensor for one in self._stored.values()]
        tensors += [part for one in self._stacks.values() for part in one.parts]
        self._files = {path: FileBlocks(path) for path in {one.path for one in tensors}}

    def names(self) -> list[str]:
        return list(self._names)

    def _of(self, name: str) -> RenamedTensor | ExpertStack:
        return self._stacks[name] if name in self._stacks else self._stored[name]

    def dtype(self, name: str) -> torch.dtype:
        return self._of(name).dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self._of(name).shape

    def extent(self, name: str) -> FileExtent | None:
        return None if name in self._stacks else self._stored[name].extent()

    def read(self, name: str) -> Tensor:
        return self.rows(name, 0, self.shape(name)[0])

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows `start:stop` of dimension 0; of a vector, its elements."""
        if name in self._stacks:
            return self._experts(self._stacks[name], start, stop)
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

    def _experts(self, stack: ExpertStack, start: int, stop: int) -> Tensor:
        """Read experts `start:stop` of a stack."""
        stop = min(stop, stack.shape[0])
        if stop <= start:
            return torch.empty((0, *stack.shape[1:]), dtype=stack.dtype)
        parts = []
        for tensor in stack.parts:
            per = torch.Size(tensor.shape[1:-1]).numel()
            whole = self._decoded(RenamedTensor(tensor, tensor.shape), start * per, stop * per)
            parts.append(whole.reshape(stop - start, *tensor.shape[1:]))
        return stack.join(parts)

    def _stack_codes(self, stack: ExpertStack) -> StoredCodes | None:
        """Return the codes of experts [experts * rows, K]; None for values stored in float."""
        kind, (experts, columns, rows) = stack.parts[0].type, (*stack.shape, 0)[:3]
        if not kind.holds_codes or len(stack.shape) != 3:
            return None

        def read(start: int, stop: int) -> dict[str, Tensor]:
            raw = torch.empty((stop - start, kind.row_bytes(columns)), dtype=torch.uint8)
            for tensor, wanted, places in stack.sources(start, stop):
                if len(wanted):
                    raw[places] = self._raw_rows(tensor, wanted)
            return kind.rows(raw.reshape(-1, kind.num_bytes), stop - start)

        return StoredCodes(kind.name, (experts * rows, columns), read, experts=True)

    def _raw_rows(self, tensor: GgufTensor, wanted: Tensor) -> Tensor:
        """Read the bytes of flat rows `wanted` int64 [n], which lie near each other: uint8 [n, bytes of a row]."""
        low, high = int(wanted.min()), int(wanted.max()) + 1
        size = tensor.row_bytes
        raw = self._files[tensor.path].tensor(torch.uint8, (high - low, size), tensor.offset + low * size)
        return raw[wanted - low]

    def _decoded(self, stored: RenamedTensor, start: int, stop: int) -> Tensor:
        """Read rows of the file's tensor: [stop - start, its innermost size]."""
        kind, width = stored.tensor.type, stored.tensor.shape[-1]
        offset = stored.tensor.offset + (stored.first + start) * stored.tensor.row_bytes
        file = self._files[stored.tensor.path]
        if not kind.holds_codes:
            return file.tensor(kind.dtype, (stop - start, width), offset)
        blocks = (stop - start) * width // kind.block
        raw = file.tensor(torch.uint8, (blocks, kind.num_bytes), offset)
        return kind.decode(raw).reshape(stop - start, width)

    def codes(self, name: str) -> StoredCodes | None:
        """Return the codes of a matrix of a block type; None for values stored in float."""
        if name in self._stacks:
            return self._stack_codes(self._stacks[name])
        stored = self._stored[name]
        kind, width = stored.tensor.type, stored.tensor.shape[-1]
        if not kind.holds_codes or len(stored.shape) != 2 or stored.subtracted:
            return None

        def rows(start: int, stop: int) -> dict[str, Tensor]:
            wanted = torch.arange(start, stop) if stored.order is None else stored.order[start:stop]
            raw = self._raw_rows(stored.tensor, wanted + stored.first)
            return kind.rows(raw.reshape(-1, kind.num_bytes), stop - start)

        return StoredCodes(kind.name, (stored.shape[0], width), rows)


def tensor_values(tensor: GgufTensor) -> list[float]:
    """Read a tensor of one dimension."""
    reader = GgufReader({"values": RenamedTensor(tensor, tensor.shape)})
    return [float(value) for value in reader.read("values")]


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
