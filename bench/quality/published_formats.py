"""Published weight formats of other projects, re-implemented; each maps float32 [N, K] to its dequantized form.

`absmax` is bitsandbytes' nf4: blocks of 64, float32 scale, the largest magnitude. `iq4_nl` is GGUF's: blocks of 32, a
float16 scale found by 15 tries around the largest value, errors weighed by the weight squared, then least squares.
"""

from __future__ import annotations

import torch
from torch import Tensor

IQ4_NL = torch.tensor([-127.0, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
TRIES = range(-7, 8)


def nearest(values: Tensor, table: Tensor) -> Tensor:
    return table[torch.bucketize(values.contiguous(), (table[1:] + table[:-1]) / 2)]


def absmax(weight: Tensor, table: Tensor, block: int) -> Tensor:
    blocks = weight.reshape(-1, block)
    scale = blocks.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return (nearest(blocks / scale, table) * scale).reshape(weight.shape)


def iq4_nl(weight: Tensor) -> Tensor:
    blocks = weight.reshape(-1, 32)
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    largest = torch.where(largest == 0, 1, largest)
    inverses = [-IQ4_NL[0] / largest, *((IQ4_NL[0] + k) / largest for k in TRIES)]
    scale = _best_scale(blocks, inverses, IQ4_NL, blocks.square())
    return _rounded(blocks, scale, IQ4_NL).reshape(weight.shape)


def searched(weight: Tensor, table: Tensor, block: int) -> Tensor:
    """Quantize by our search with a float16 scale: shares of the largest magnitude, both signs, least squares."""
    blocks = weight.reshape(-1, block)
    largest = blocks.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    shares = torch.linspace(0.5, 1.3, 33)
    inverses = [1 / (share * largest) for share in torch.cat([shares, -shares])]
    scale = _best_scale(blocks, inverses, table, torch.ones_like(blocks))
    return _rounded(blocks, scale, table).reshape(weight.shape)


def _best_scale(blocks: Tensor, inverses: list[Tensor], table: Tensor, importance: Tensor) -> Tensor:
    """Return the least-squares scale of the codes of the inverse that leaves the smallest error."""
    best = saved = torch.zeros((len(blocks), 1))
    for inverse in inverses:
        fitted = nearest(blocks * inverse, table)
        along = (importance * fitted * blocks).sum(1, keepdim=True)
        square = (importance * fitted * fitted).sum(1, keepdim=True)
        scale = along / torch.where(square > 0, square, 1)
        better = scale * along > saved
        best, saved = torch.where(better, scale, best), torch.where(better, scale * along, saved)
    return best


def _rounded(blocks: Tensor, scale: Tensor, table: Tensor) -> Tensor:
    stored = scale.half().float()
    return nearest(blocks / torch.where(stored == 0, 1, stored), table) * stored
