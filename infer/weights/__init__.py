"""Weights on disk, one tensor at a time: the protocol that quantizing and loading read through."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


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
