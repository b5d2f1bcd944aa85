"""Overhead of one call: the time of a layer too small to compute, in a compiled graph."""

from __future__ import annotations

import torch

from bench.kernels import linear_infer
from bench.shared import timing
from bench.shared.bars import Bar

NAME = "call of a layer"
WIDTH, LAYERS = 64, 64
MOST = 5.0  # µs


def measure() -> list[Bar]:
    """Measure 64×64 layers in sequence, compiled as `infer optimize` does but not chained: µs for each."""
    weight, x = torch.randn(WIDTH, WIDTH) / WIDTH**0.5, torch.randn(1, WIDTH)
    ours = linear_infer.lut4(weight, x, LAYERS)
    off = linear_infer.relative(ours.side.output(), ours.twin())
    bar = Bar(work=NAME, rival="4 bits, 64×64, M=1", need=MOST, unit="µs", below=True)
    if off > linear_infer.EXACT:
        bar.why = f"ours is {off:.1e} off its slow twin"
        return [bar]
    bar.ours = timing.interleaved([ours.side])["ours"]
    bar.got, bar.details = bar.ours * 1e6, {"seconds": {"ours": bar.ours}, "off_twin": off}
    return [bar]
