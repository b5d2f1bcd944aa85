"""Weight reader over a state dict in memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class DictReader:
    """Reader of tensors in memory, by name; every read returns a copy, as from a file."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}

    def names(self) -> list[str]:
        return list(self._tensors)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str) -> Tensor:
        return self._tensors[name].clone(memory_format=torch.contiguous_format)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        return self._tensors[name][start:stop].clone(memory_format=torch.contiguous_format)
