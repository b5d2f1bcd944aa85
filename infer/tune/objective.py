"""Contract between the training loop and the objective it minimizes, and the rows it trains on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

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
