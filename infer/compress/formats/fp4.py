"""fp4: 4-bit floats of two exponent bits and one of mantissa (e2m1), blocks of 64 or 16.

The values are those of the OCP Microscaling formats (version 1.0, section 5.3.3): ±0, 0.5, 1, 1.5, 2, 3, 4 and 6, here
over 6 and in ascending order, so that code 7 is -0 and code 8 is +0. 4.125 bits and 32/K per weight;
`fp4:16`, with a scale for each 16, 4.5 and 32/K.
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

SEARCHED_ON = ("cuda",)  # elsewhere nf4 has its size and speed, and is more faithful
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TABLE = tuple(value / 6 for value in (*(-m for m in reversed(MAGNITUDES)), *MAGNITUDES))


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
