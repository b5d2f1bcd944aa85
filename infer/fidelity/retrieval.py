"""Retrieval fidelity of embeddings: every row queries its nearest neighbours among the others, by cosine.

A small error of each vector says little about the order of their similarities, and the order is what search uses.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

MOST_ROWS = 512  # kept: their similarities are a square
NEAREST = 10
FEWEST_ROWS = 3

WHY = {
    "nearest": "share of rows whose nearest neighbour among the rows is the float one",
    "recall": f"share of the {NEAREST} nearest neighbours (fewer among few rows) that are the float ones",
    "rank_correlation": "Spearman, of each row's similarities to all others, mean over rows",
}


class Retrieval:
    """Accumulated embeddings [rows, width] of both models; `metrics` compares nearest-neighbour orders."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._rows = 0

    def add(self, reference: Tensor, got: Tensor) -> None:
        left = max(MOST_ROWS - self._rows, 0)
        self._pairs.append((reference[:left].float().cpu(), got[:left].float().cpu()))
        self._rows += len(reference[:left])

    def metrics(self) -> Iterator[tuple[str, float]]:
        """Compute retrieval metrics of embeddings; empty for fewer than three rows or non-finite values."""
        if self._rows < FEWEST_ROWS:
            return
        expected, actual = (torch.cat([pair[side] for pair in self._pairs]) for side in (0, 1))
        if not bool(expected.isfinite().all() and actual.isfinite().all()):
            return
        before, after = _similarities(expected), _similarities(actual)
        count = min(NEAREST, self._rows - 1)
        top, found = before.topk(count).indices, after.topk(count).indices
        yield "nearest", float((top[:, 0] == found[:, 0]).float().mean())
        yield "recall", float((top[:, :, None] == found[:, None, :]).any(-1).float().mean())
        yield "rank_correlation", _spearman(before, after)


def _similarities(rows: Tensor) -> Tensor:
    """Compute the cosine of every row with every other, [n, n]; -inf on the diagonal."""
    unit = F.normalize(rows.double(), dim=-1)
    return (unit @ unit.t()).fill_diagonal_(-torch.inf)


def _spearman(before: Tensor, after: Tensor) -> float:
    """Compute the mean over rows of 1 - 6 Σd² / n(n² - 1), d between ranks; a row's own entry ranks last in both."""
    n = before.shape[1] - 1
    if n < 2:
        return 1.0
    ranks = [t.argsort(dim=1, descending=True, stable=True).argsort(dim=1).double() for t in (before, after)]
    squares = (ranks[0] - ranks[1]).square().sum(1)
    return float((1 - 6 * squares / (n * (n * n - 1))).mean())
