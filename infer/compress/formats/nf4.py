"""NF4: 4-bit codes into the quantiles of a normal distribution, blocks of 64 or 16, double-quantized scales.

Table from QLoRA (Dettmers et al. 2023, arXiv 2305.14314, appendix E). Scales are searched with both signs
instead of taken from the absolute maximum, and stored as int8 times one float32 for each row: 4.125 bits and
32/K per weight. `nf4:16` has a scale for each 16: 4.5 bits and 32/K, and a third of the squared error less.
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

TABLE = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


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
