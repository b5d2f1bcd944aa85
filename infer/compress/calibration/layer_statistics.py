"""Statistics of one layer's input: absolute maximum, mean square per column, histogram.

A layer keeps one vector and one histogram, so memory doesn't grow with the data; when products of columns are asked
for (`hessian`), a square of numbers too, in blocks along its diagonal where all of it has no room.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from .gptq import Factor, factor
from .smoothquant import Balance, balance, balance_rows

BINS = 2048
LEVELS = 127
# Input rows kept of each Linear, and of one call.
KEPT, KEPT_OF_CALL = 128, 16
TINY = torch.finfo(torch.float32).tiny


@dataclass
class LayerStats:
    """Implementation of `compress.Stats`: a histogram of |x| in `BINS` bins of `[0, top]`; `top` doubles as needed."""

    absmax: Tensor
    square_sum: Tensor  # float64 [columns]
    num_rows: int
    histogram: Tensor  # float64 [BINS]
    top: float
    # float32 [W, W] sums of outer products, along the diagonal, and what becomes of them.
    hessians: list[Tensor] = field(default_factory=list)
    made: list[Factor] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)  # a few of the input rows of a Linear
    balance: Balance | None | Literal["unknown"] = (
        "unknown"  # decided once for all blocks of rows of a weight
    )
    # The weights of all Linear layers that read the same input, and how those are balanced together.
    readers: list[Tensor] = field(default_factory=list)
    shared: Balance | None | Literal["unknown"] = "unknown"
    result: LayerStats | None = None  # of what a convolution gives, which may be added to in int8
    is_lookup: bool = False  # of an embedding: gradients of its rows, nothing of activations
    # Sum of the weights of the Hessian's rows, and of their squares; none where all weigh the same.
    weight_sums: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def empty(cls, columns: int) -> LayerStats:
        """Return the statistics of no rows of `columns` columns."""
        square, histogram = (torch.zeros(count, dtype=torch.float64) for count in (columns, BINS))
        return cls(torch.zeros(()), square, 0, histogram, 0.0)

    @classmethod
    def of_lookup(cls, columns: int) -> LayerStats:
        """Return the statistics of an embedding of `columns` columns without gradients."""
        made = cls.empty(columns)
        made.is_lookup = True
        return made

    @property
    def square_mean(self) -> Tensor:
        return (self.square_sum / max(self.num_rows, 1)).float()

    @property
    def hessian_rows(self) -> float:
        """Rows of equal weight whose Hessian has as much noise as this one: (sum of weights)² / sum of squares."""
        total, squares = self.weight_sums
        return total * total / squares if squares else self.num_rows

    def importance(self, columns: int) -> Tensor | None:
        """Return the importance float32 [columns] of a weight of so many; None for grouped convolutions."""
        taps, rest = divmod(columns, len(self.square_sum))
        return None if rest or not taps else self.square_mean.repeat_interleave(taps)

    def factors(self, columns: int) -> list[Factor]:
        """Return the GPTQ factors of a weight of so many columns; empty when Hessians were not collected.

        They take the place of the Hessians.
        """
        while self.hessians:
            start = self.made[-1].stop if self.made else 0
            self.made.append(factor(start, self.hessians.pop(0)))
        return self.made if self.made and self.made[-1].stop == columns else []

    @property
    def clip(self) -> Tensor:
        """Clipping bound whose int8 grid has the least squared error: uniform noise inside, the excess outside."""
        if self.top == 0:
            return torch.zeros(())
        centres = (torch.arange(BINS, dtype=torch.float64) + 0.5) * (self.top / BINS)
        bounds = float(self.absmax) * torch.linspace(0.1, 1.0, 91, dtype=torch.float64)
        inside = torch.searchsorted(centres, bounds)
        count = torch.cat([torch.zeros(1, dtype=torch.float64), self.histogram.cumsum(0)])[inside]
        noise = count * (bounds / LEVELS).square() / 12
        excess = (centres - bounds[:, None]).clamp_min(0).square() @ self.histogram
        return bounds[(noise + excess).argmin()].float()

    def add(self, rows: Tensor) -> None:
        """Add input rows float32 [count, columns] to the statistics."""
        if rows.numel() == 0:
            return
        magnitude = rows.abs()
        largest = float(magnitude.max())
        self.absmax = self.absmax.clamp_min(largest)
        self.square_sum += rows.square().sum(0, dtype=torch.float64)
        self.num_rows += rows.shape[0]
        self._widen(largest)
        if self.top > 0:
            self.histogram += torch.histc(magnitude, BINS, 0.0, self.top).double()

    def keep(self, rows: Tensor) -> None:
        """Keep some of rows float32 [count, columns], spread evenly, until there are `KEPT`."""
        room = min(KEPT - sum(map(len, self.kept)), KEPT_OF_CALL)
        if room > 0 and len(rows):
            self.kept.append(rows[:: max(len(rows) // room, 1)][:room].clone())

    def balanced(self, weight: Tensor) -> Balance | None:
        """Return the SmoothQuant balance for a Linear weight float32 [rows, columns]; None without gain.

        The first block of rows decides for all.
        """
        if self.balance == "unknown":
            rows = torch.cat(self.kept) if self.kept else torch.empty(0, weight.shape[1])
            self.balance = balance(rows, weight, (self.clip / LEVELS).clamp_min(TINY))
        return self.balance

    def balanced_together(self) -> Balance | None:
        """Return one SmoothQuant balance of dynamic int8 for all layers that read this input, or None."""
        if self.shared == "unknown":
            rows = torch.cat(self.kept) if self.kept and self.readers else torch.empty(0, 0)
            feedback = bool(self.hessians or self.made)
            self.shared = balance_rows(rows, self.readers, feedback=feedback)
            self.readers = []
        return self.shared

    def add_gradients(self, rows: Tensor, width: int) -> None:
        """Add the gradients float32 [count, columns] of an embedding's rows."""
        self.square_sum += rows.square().sum(0, dtype=torch.float64)
        self.num_rows += len(rows)
        self._count_weights(rows.square().sum(1))
        self._add_products(rows, width)

    def add_products(self, rows: Tensor, width: int, weights: Tensor | None = None) -> None:
        """Add the products of rows float32 [count, K], in diagonal blocks of `width` columns; `weights` [count]."""
        if weights is not None:
            self._count_weights(weights)
            rows = rows * weights.sqrt()[:, None]
        self._add_products(rows, width)

    def _count_weights(self, weights: Tensor) -> None:
        total, squares = self.weight_sums
        each = weights.double()
        self.weight_sums = total + float(each.sum()), squares + float(each.square().sum())

    def _add_products(self, rows: Tensor, width: int) -> None:
        parts = rows.split(width, 1)
        if not self.hessians:
            self.hessians = [torch.zeros((p.shape[1], p.shape[1])) for p in parts]
        for hessian, part in zip(self.hessians, parts, strict=True):
            hessian.addmm_(part.t(), part)

    def _widen(self, largest: float) -> None:
        if self.top == 0 and largest > 0:
            self.top = 2.0 ** torch.tensor(largest).log2().ceil().item()
        while largest > self.top:
            merged = self.histogram.reshape(-1, 2).sum(1)
            self.histogram = torch.cat([merged, torch.zeros_like(merged)])
            self.top *= 2
