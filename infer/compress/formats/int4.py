"""int4: 4-bit codes on a uniform grid, -8 to 7 eighths of a signed scale, blocks of 64 or 16.

Code c stands for `(c - 8) / 8 * scale`. A negative scale gives the longer side of the grid to the positive weights.
4.125 bits and 32/K per weight; `int4:16`, with a scale for each 16, 4.5 and 32/K.
"""

from __future__ import annotations

from torch import Tensor

from ...plan import Plan
from ..coded_format import dequantize, embedding, experts, linear
from ..quantizer import Stats
from ..table_format import (
    NEEDS_STATS,
    OPTIONS,
    PRECISION_CLASS,
    ROWS,
    SHARED,
    WEIGHT_ONLY,
    missing,
    quantize_with,
    refuses,
)

TABLE = tuple(k / 8 for k in range(-8, 8))


def quantize(weight: Tensor, stats: Stats | None, plan: Plan) -> dict[str, Tensor]:
    """Quantize float [N, K] → codes uint8 [N, K/2], table [1, 16], scale int8 [N, K/group], super_scale float32 [N]."""
    return quantize_with(weight, TABLE, stats, plan)


__all__ = [
    "NEEDS_STATS",
    "OPTIONS",
    "PRECISION_CLASS",
    "ROWS",
    "SHARED",
    "TABLE",
    "WEIGHT_ONLY",
    "dequantize",
    "embedding",
    "experts",
    "linear",
    "missing",
    "quantize",
    "refuses",
]
