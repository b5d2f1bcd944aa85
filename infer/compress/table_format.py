"""Shared implementation of formats with one 16-entry table: nf4, int4, fp4.

--quant nf4       a scale for each 64 weights: 4.125 bits and 32/K per weight
--quant nf4:16    a scale for each 16: 4.5 bits and 32/K
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..kernels.ops.bitpack import FINE, GROUP, pack
from ..plan import Plan
from .calibration.coordinate_descent import FEWEST_ROWS, refine
from .calibration.gptq import fit_with_feedback
from .calibration.group_scales import fit
from .format_constraints import refuses_table_format
from .quantizer import Stats

BITS = 4
OPTIONS = ("", str(FINE))
PRECISION_CLASS = "4bit"
WEIGHT_ONLY = frozenset(OPTIONS)
NEEDS_STATS: frozenset[str] = frozenset()
ROWS = 1
SHARED = frozenset({"table"})


def missing() -> str | None:
    return None


def refuses(layer: nn.Module, plan: Plan) -> str | None:
    return refuses_table_format(layer, plan.quant, GROUP)


def quantize_with(
    weight: Tensor, values: Sequence[float], stats: Stats | None, plan: Plan
) -> dict[str, Tensor]:
    """Quantize float [N, K] with a table of 16 values.

    Returns codes uint8 [N, K/2], table [1, 16], scale int8 [N, K/group], super_scale float32 [N].
    """
    table = torch.tensor([values], dtype=torch.float32)
    group = int(plan.quant_option or GROUP)
    codes, scale, row_scale = fit_calibrated(weight.float(), table, stats, group)
    return {"codes": pack(codes, BITS), "table": table, "scale": scale, "super_scale": row_scale}


def fit_calibrated(
    weight: Tensor, table: Tensor, stats: Stats | None, group: int = GROUP
) -> tuple[Tensor, Tensor, Tensor]:
    """Fit group scales with the available calibration: none, mean squares of columns, or Hessians."""
    if stats is None:
        return fit(weight, table, None, group)
    importance = stats.importance(weight.shape[1])
    if factors := stats.factors(weight.shape[1]):
        codes, scale, row_scale = fit_with_feedback(weight, table, importance, factors, group)
        if stats.hessian_rows >= FEWEST_ROWS * weight.shape[1]:
            codes, scale = refine(weight, table, factors, codes, scale, row_scale)
        return codes, scale, row_scale
    return fit(weight, table, importance, group)
