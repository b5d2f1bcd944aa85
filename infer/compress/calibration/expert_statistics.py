"""Calibration statistics of experts: tokens that each saw, and the mean square of its input columns.

A router sends most tokens to a few experts, so that each expert has statistics of its own. One that saw fewer than
`FEWEST` tokens is quantized by plain rounding, without importance of columns: few rows say nothing about the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels.expert_layers import ExpertLinear
from ...spec import Finding
from .gptq import Factor
from .smoothquant import Balance

FEWEST = 32  # tokens of an expert, below which its statistics are not used


@dataclass
class OneExpertStats:
    """Implementation of `compress.Stats` for the rows of one expert; neither error feedback nor static steps."""

    absmax: Tensor
    square_mean: Tensor
    num_rows: int

    clip = property(lambda self: self.absmax)
    hessian_rows = 0.0  # it has no Hessian
    result = None

    def importance(self, columns: int) -> Tensor | None:
        """Return the mean squares float32 [columns]; None for a weight of other columns."""
        return self.square_mean if len(self.square_mean) == columns else None

    def factors(self, columns: int) -> list[Factor]:
        return []

    def balanced(self, weight: Tensor) -> Balance | None:
        return None

    def balanced_together(self) -> Balance | None:
        return None


class ExpertStats(OneExpertStats):
    """Statistics of all experts of one layer: `counts` int64 [E], `square_sum` float64 [E, K]."""

    def __init__(self, layer: ExpertLinear) -> None:
        super().__init__(torch.zeros(()), torch.zeros(0), 0)
        self.counts = torch.zeros(layer.num_experts, dtype=torch.int64)
        self.square_sum = torch.zeros((layer.num_experts, layer.in_features), dtype=torch.float64)

    def add(self, rows: Tensor, expert: Tensor) -> None:
        """Add input rows float32 [S, K], each seen by the expert of `expert` int64 [S]."""
        if not len(rows):
            return
        self.absmax = self.absmax.clamp_min(rows.abs().max())
        self.counts += torch.bincount(expert, minlength=len(self.counts))
        self.square_sum.index_add_(0, expert, rows.square().double())
        self.num_rows += len(rows)
        self.square_mean = (self.square_sum.sum(0) / self.num_rows).float()

    def of(self, expert: int) -> OneExpertStats | None:
        """Return the statistics of one expert; None where it saw fewer than `FEWEST` tokens."""
        count = int(self.counts[expert])
        if count < FEWEST:
            return None
        return OneExpertStats(self.absmax, (self.square_sum[expert] / count).float(), count)


def record_experts(
    stats: dict[str, Any], name: str, mask: Tensor | None, layer: ExpertLinear, args: tuple[Any, ...]
) -> None:
    """Add one call of an `ExpertLinear` to the statistics; tokens that `mask` hides don't count."""
    x, expert, top_k = args
    rows = x.detach().float().cpu().repeat_interleave(top_k, 0)
    expert = expert.detach().cpu()
    if mask is not None and len(rows) % mask.numel() == 0:
        seen = mask.reshape(-1).bool().cpu().repeat_interleave(len(rows) // mask.numel())
        rows, expert = rows[seen], expert[seen]
    stats.setdefault(name, ExpertStats(layer)).add(rows, expert)


def expert_findings(stats: Mapping[str, Any]) -> list[Finding]:
    """Report how many experts saw too few tokens for statistics of their own, and in which layer most."""
    seen = {name: found for name, found in stats.items() if isinstance(found, ExpertStats)}
    if not seen:
        return []
    total = sum(len(found.counts) for found in seen.values())
    few = {name: int((found.counts < FEWEST).sum()) for name, found in seen.items()}
    worst = max(few, key=lambda name: few[name])
    why = f"of {total} that saw fewer than {FEWEST} tokens are quantized by plain rounding"
    if few[worst]:
        why += f"; most in {worst}: {few[worst]} of {len(seen[worst].counts)}"
    return [Finding("calibrate", "experts with few tokens", sum(few.values()), "experts", why)]
