"""Contract between the training loop and the objective it minimizes, and the rows it trains on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

IGNORED = -100  # label of a token that is not predicted, torch's own


class Objective(Protocol):
    """Loss of one batch as a sum over terms, tokens or rows, and the number of terms.

    Sums make accumulation exact: the gradient of a step is that of the sum over all micro-batches and processes,
    divided by the number of all terms. Random numbers come from torch's generators, which the loop seeds before each
    step.
    """

    model: nn.Module  # with requires_grad on what is trained

    def loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the differentiable sum of the terms' losses and the number of terms, both scalars."""
        ...

    def measure(self, batch: Any) -> tuple[Tensor | float, Tensor | float]:
        """Return the held-out measure as a sum, lower is better, and its number of terms; called without gradient."""
        ...


class Rows(Protocol):
    """Rows of training or held-out data, with a deterministic order."""

    def __len__(self) -> int: ...

    def order(self, seed: int, epoch: int) -> Sequence[int]:
        """Return the numbers of all rows in the order of an epoch; equal arguments give equal orders."""
        ...

    def batch(self, numbers: Sequence[int]) -> Any:
        """Collate these rows, at least one, to the batch that the objective takes."""
        ...

    @property
    def digest(self) -> str:
        """Hash of the contents: a checkpoint is resumed with the data it was made with."""
        ...


class TensorRows:
    """Rows of named tensors in memory, all of the same length; a batch is the same dict of fewer rows."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def order(self, seed: int, epoch: int) -> Sequence[int]:
        return shuffled(len(self), seed, epoch)

    def batch(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        index = torch.tensor(numbers, dtype=torch.int64)
        return {name: tensor[index] for name, tensor in self.tensors.items()}

    @property
    def digest(self) -> str:
        return digest_of(self.tensors)


def shuffled(count: int, seed: int, epoch: int) -> list[int]:
    """Return a permutation of `range(count)` that depends on nothing but the arguments."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) & (2**63 - 1))
    return torch.randperm(count, generator=generator).tolist()


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of the names, dtypes, shapes and bytes of tensors."""
    import hashlib

    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def rows_of_step(rows: Rows, start: int, count: int, seed: int) -> list[int]:
    """Return `count` row numbers from position `start` of the endless stream of epochs."""
    found: list[int] = []
    while len(found) < count:
        epoch, position = divmod(start + len(found), len(rows))
        found += rows.order(seed, epoch)[position : position + count - len(found)]
    return found
