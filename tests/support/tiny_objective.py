"""A tiny network with a token-averaged loss over rows of different lengths, for tests of the training loop."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from infer.tune.data.rows import TensorRows

WIDTH = 12


class TokenObjective:
    """Cross-entropy of next tokens; targets of -1 are no terms."""

    def __init__(self, seed: int = 0, dropout: float = 0.0) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model = nn.Sequential(
                nn.Embedding(WIDTH, 16),
                nn.Linear(16, 24),
                nn.Tanh(),
                nn.Dropout(dropout),
                nn.Linear(24, WIDTH),
            )

    def loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = self.model(batch["ids"])
        targets = batch["targets"]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
        return loss, (targets >= 0).sum()

    def measure(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.loss(batch)


def token_rows(count: int = 23, length: int = 9, seed: int = 1) -> TensorRows:
    """Rows of a rule, `target = 3 id + 1`, of 1 to `length` tokens each."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(WIDTH, (count, length), generator=generator)
    lengths = torch.randint(1, length + 1, (count, 1), generator=generator)
    targets = torch.where(torch.arange(length) < lengths, (3 * ids + 1) % WIDTH, -1)
    return TensorRows({"ids": ids, "targets": targets})
