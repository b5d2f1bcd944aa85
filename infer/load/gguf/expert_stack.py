"""Experts that transformers holds by columns, several tensors of the file joined row by row (GPT-OSS)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import SourceError
from .header import GgufTensor


@dataclass(frozen=True)
class ExpertStack:
    """Tensors [experts, rows, K] as one [experts, K, rows * parts], the rows of all parts in turn.

    Biases are [experts, rows] as [experts, rows * parts].
    """

    parts: tuple[GgufTensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        experts, rows, *columns = self.parts[0].shape
        return (experts, *columns, rows * len(self.parts))

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].type.dtype

    def join(self, parts: list[Tensor]) -> Tensor:
        """Join decoded rows of whole experts, each [n, rows, K] or [n, rows]."""
        joined = torch.stack(parts, 2).flatten(1, 2)
        return joined.transpose(1, 2).contiguous() if joined.ndim == 3 else joined

    def sources(self, start: int, stop: int) -> list[tuple[GgufTensor, Tensor, Tensor]]:
        """Return, for flat rows `start:stop` of all experts, each tensor, its flat rows, and their places in order."""
        rows, count = self.parts[0].shape[1], len(self.parts)
        flat = torch.arange(start, stop)
        expert, inner = flat // (rows * count), flat % (rows * count)
        found = []
        for number, tensor in enumerate(self.parts):
            places = (inner % count == number).nonzero().flatten()
            found.append((tensor, (expert * rows + inner // count)[places], places))
        return found


def stack_experts(
    found: Mapping[tuple[str, str, str], GgufTensor], stacks: Mapping[str, tuple[str, ...]], path: Path
) -> dict[str, Any]:
    """Return the stacks by transformers' names, of tensors by (layer, name in the block, ".weight" or ".bias").

    Raises `SourceError` where a tensor of a stack is absent, or of another shape or type than the others.
    """
    made: dict[str, Any] = {}
    for layer, stem, ending in found:
        name, stems = next((name, stems) for name, stems in stacks.items() if stem in stems)
        parts = [found.get((layer, one, ending)) for one in stems]
        if None in parts:
            lacks = f"blk.{layer}.{stems[parts.index(None)]}{ending}"
            raise SourceError(f"the file lacks the tensor {lacks!r}", where=str(path))
        held = tuple(part for part in parts if part is not None)
        if len({(one.shape, one.type.name) for one in held}) > 1 or len(held[0].shape) != 2 + (
            ending == ".weight"
        ):
            raise SourceError(
                f"the tensors of the experts of layer {layer} differ in shape or type", where=str(path)
            )
        made[f"model.layers.{layer}.{name}{'_bias' if ending == '.bias' else ''}"] = ExpertStack(held)
    return made
