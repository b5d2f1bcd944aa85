"""SmoothQuant (Xiao et al. 2022): outlier columns of the input are scaled down, their weights up.

SmoothQuant (Xiao et al. 2022, arXiv 2211.10438): column j of the input is multiplied by `m[j]` and column j of the
weight divided by it, `1 / m = max|x|^α / max|w|^(1 - α)`. Here α is searched for each layer on the error of its output
over kept input rows, and a layer that gains less than `LEAST_GAIN` is left as it is. Dynamic int8 balances layers that
read one input together, so that it is rounded once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .gptq import Factor

LEVELS = 127
ALPHAS = (0.35, 0.5, 0.65, 0.8)
CLIPS = torch.linspace(1.0, 0.4, 13)
LEAST_GAIN = 0.1
TINY = torch.finfo(torch.float32).tiny


# What error feedback leaves of the rounding of weights (MiniLM 0.4, BERT-base 0.2; activations it can't help).
LEFT_BY_FEEDBACK = 0.4
MOST_ROWS = 1024  # of the weights that are balanced together


@dataclass(frozen=True)
class Balance:
    """Column multipliers float32 [K] of the input, and the scalar `step` of the static int8 grid after them."""

    multiplier: Tensor
    step: Tensor | None = None

    def weight(self, weight: Tensor) -> Tensor:
        return weight / self.multiplier

    def factors(self, factors: Sequence[Factor]) -> list[Factor]:
        """Return the GPTQ factors of the balanced input: H → M H M turns the inverse's factor U into U / M."""
        return [Factor(f.start, f.upper / self.multiplier[f.start : f.stop]) for f in factors]


def balance(rows: Tensor, weight: Tensor, step: Tensor) -> Balance | None:
    """Return the balance of least error of `rows @ weight.T`, or None when the grid of `step` is as good.

    rows float32 [R, K] are inputs of the layer, weight float32 [N, K] (some of its rows suffice). One half of the rows
    says how large the columns are, the other how good that is.
    """
    if len(rows) < 2 or weight.numel() == 0:
        return None
    seen, judging = rows[::2], rows[1::2]
    want = judging @ weight.t()
    usual = [step, *(seen.abs().amax() * CLIPS / LEVELS).clamp_min(TINY)]
    best, least = None, min(_static_error(judging, weight, each, want) for each in usual) * (1 - LEAST_GAIN)
    for multiplier in _multipliers(seen, weight):
        own, balanced = judging * multiplier, weight / multiplier
        for tried in ((seen * multiplier).abs().amax() * CLIPS / LEVELS).clamp_min(TINY):
            lost = _static_error(own, balanced, tried, want)
            if lost < least:
                best, least = Balance(multiplier, tried), lost
    return best


def balance_rows(rows: Tensor, weights: Sequence[Tensor], *, feedback: bool) -> Balance | None:
    """Return the balance of dynamic int8 for all layers with weights [N, K] that read `rows` [R, K], or None.

    `feedback`: the weights will be rounded with GPTQ, which compensates part of their error.
    """
    if len(rows) < 2 or not weights or not all(weight.numel() for weight in weights):
        return None
    weight = torch.cat([w[:: -(-len(w) * len(weights) // MOST_ROWS)].detach().float() for w in weights])
    seen, judging = rows[::2], rows[1::2]
    share = LEFT_BY_FEEDBACK if feedback else 1.0
    best, least = None, _dynamic_error(judging, weight, share) * (1 - LEAST_GAIN)
    for multiplier in _multipliers(seen, weight):
        lost = _dynamic_error(judging * multiplier, weight / multiplier, share)
        if lost < least:
            best, least = Balance(multiplier), lost
    return best


def _multipliers(seen: Tensor, weight: Tensor) -> Iterator[Tensor]:
    """Yield one multiplier for each of `ALPHAS`, of geometric mean one; 1 where a column is zero."""
    of_rows, of_weight = seen.abs().amax(0), weight.abs().amax(0)
    used = (of_rows > 0) & (of_weight > 0)
    for alpha in ALPHAS:
        divisor = torch.where(used, of_rows**alpha / of_weight.clamp_min(TINY) ** (1 - alpha), 1)
        multiplier = torch.where(used, 1 / divisor, 1)
        yield multiplier / multiplier[used].log().mean().exp() if bool(used.any()) else multiplier


def _dynamic_error(rows: Tensor, weight: Tensor, share: float) -> float:
    """Return the error of a dynamic int8 product; `share` of the weights' error counts."""
    low, high = rows.amin(1, keepdim=True).clamp_max(0), rows.amax(1, keepdim=True).clamp_min(0)
    step = ((high - low) / (2 * LEVELS)).clamp_min(TINY)
    scale = (weight.abs().amax(1, keepdim=True) / LEVELS).clamp_min(TINY)
    of_rows = ((rows / step).round() * step - rows) @ weight.t()
    of_weight = rows @ ((weight / scale).round() * scale - weight).t()
    return float(torch.stack([of_rows.norm(), share * of_weight.norm()]).norm())


def _static_error(rows: Tensor, weight: Tensor, step: Tensor, want: Tensor) -> float:
    """Return the norm of a product's error with int8 rows and int8 weights."""
    scale = (weight.abs().amax(1, keepdim=True) / LEVELS).clamp_min(TINY)
    rounded = (rows / step).round().clamp(-LEVELS, LEVELS) * step
    return float((rounded @ ((weight / scale).round() * scale).t() - want).norm())
