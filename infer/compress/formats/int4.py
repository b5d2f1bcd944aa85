"""int4: 4-bit codes on a uniform grid, -8 to 7 eighths of a signed scale, blocks of 64 or 16.

Code c stands for `(c - 8) / 8 * scale`. A negative scale gives the longer side of the grid to the positive weights.
4.125 bits and 32/K per weight; `int4:16`, with a scale for each 16, 4.5 and 32/K.
"""

from __future__ import annotations

from torch import Tensor, nn

from ...kernels.ops.bitpack import GROUP
from ...plan import Plan
from .. import Stats
from ..refusals import refuses_table_format
from ..table_format import OPTIONS, dequantize, embedding, experts, linear, quantize_with

PRECISION_CLASS = "4bit"
WEIGHT_ONLY = frozenset(OPTIONS)
NEEDS_STATS: frozenset[str] = frozenset()
ROWS = 1
SHARED = frozenset({"table"})
TABLE = tuple(k / 8 for k in range(-8, 8))


def missing() -> str | None:
    return None


def refuses(layer: nn.Module, plan: Plan) -> str | None:
    return refuses_table_format(layer, plan.quant, GROUP)


def quantize(weight: Tensor, stats: Stats | None, plan: Plan) -> dict[str, Tensor]:
    """Quantize float [N, K] → codes uint8 [N, K/2], table [1, 16], scale int8 [N, K/group], row_scale float32 [N]."""
    return quantize_with(weight, TABLE, stats, plan)


__all__ = [
    "OPTIONS",
    "TABLE",
    "dequantize",
    "embedding",
    "experts",
    "linear",
    "missing",
    "quantize",
    "refuses",
]
