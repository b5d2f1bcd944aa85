"""Balancing: what is hard to round in a layer's input moves into its weight, where each row has a scale of its own.

SmoothQuant (Xiao et al. 2022, arXiv 2211.10438): column j of the input is multiplied by `m[j]` and column j of the
weight divided by it, `1 / m = max|x|^α / max|w|^(1 - α)`. Here α is searched for each layer on the error of its output
over kept input rows, and a layer that gains less than `LEAST_GAIN` is left as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ._feedback import Factor

LEVELS = 127
ALPHAS = (0.35, 0.5, 0.65, 0.8)
CLIPS = torch.linspace(1.0, 0.4, 13)
LEAST_GAIN = 0.1
TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Balance:
    """`multiplier` float32 [K] of the input columns; `step` of the static int8 grid behind it, a scalar."""

    multiplier: Tensor
    step: Tensor

    def weight(self, weight: Tensor) -> Tensor:
        return weight / self.multiplier

    def factors(self, factors: Sequence[Factor]) -> list[Factor]:
        """Of the balanced input: with H → M H M the inverse's factor is U → U / M."""
        return [Factor(f.start, f.upper / self.multiplier[f.start : f.stop]) for f in factors]


def balance(rows: Tensor, weight: Tensor, step: Tensor) -> Balance | None:
    """The balance that loses least of `rows @ weight.T`, or None when rounding on the grid of `step` is as good.

    rows float32 [R, K] are inputs of the layer, weight float32 [N, K] (some of its rows suffice). One half of the rows
    says how large the columns are, the other how good that is.
    """
    if len(rows) < 2 or weight.numel() == 0:
        return None
    seen, judging = rows[::2], rows[1::2]
    want = judging @ weight.t()
    usual = [step, *(seen.abs().amax() * CLIPS / LEVELS).clamp_min(TINY)]
    best, least = None, min(_lost(judging, weight, each, want) for each in usual) * (1 - LEAST_GAIN)
    of_rows, of_weight = seen.abs().amax(0), weight.abs().amax(0)
    used = (of_rows > 0) & (of_weight > 0)
    for alpha in ALPHAS:
        divisor = torch.where(used, of_rows**alpha / of_weight.clamp_min(TINY) ** (1 - alpha), 1)
        multiplier = torch.where(used, 1 / divisor, 1)
        multiplier = multiplier / multiplier[used].log().mean().exp() if bool(used.any()) else multiplier
        own, balanced = judging * multiplier, weight / multiplier
        for tried in ((seen * multiplier).abs().amax() * CLIPS / LEVELS).clamp_min(TINY):
            lost = _lost(own, balanced, tried, want)
            if lost < least:
                best, least = Balance(multiplier, tried), lost
    return best


def _lost(rows: Tensor, weight: Tensor, step: Tensor, want: Tensor) -> float:
    """The norm of what int8 rows and int8 weights lose of a product."""
    scale = (weight.abs().amax(1, keepdim=True) / LEVELS).clamp_min(TINY)
    rounded = (rows / step).round().clamp(-LEVELS, LEVELS) * step
    return float((rounded @ ((weight / scale).round() * scale).t() - want).norm())
