"""float8 linear layers: `y = x @ weight.T + bias`, `weight[n, k] = codes[n, k] * scale[n]`, codes float8 e4m3.

`linear_fp8(x, codes, scale, bias)`: x [..., K] of any float dtype goes to float8 by one step for each row,
`absmax / 448` as in the FP8 paper (Micikevicius et al. 2022, arXiv 2209.05433, section 3), on the fly. Sums are
float32, then `* step * scale + bias`, given in x's dtype. A row of zeros gives the bias; NaN and infinity stay in
their row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .define_op import define

LARGEST = 448.0  # of float8 e4m3fn, which has no infinity
TINY = torch.finfo(torch.float32).tiny


def to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [M, K] → float8 [M, K] and steps float32 [M, 1]; `q * step` is x, rounded to 3 bits after the first."""
    step = (x.abs().amax(-1, keepdim=True) / LARGEST).clamp_min(TINY)
    return (x / step).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), step


def _linear(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1]).float()
    if rows.numel() == 0:
        y = rows @ codes.float().t()
    else:
        q, step = to_float8(rows)
        y = F.linear(q.float(), codes.float()) * step * scale.float()
    y = y if bias is None else y + bias.float()
    return y.to(x.dtype).reshape(*x.shape[:-1], codes.shape[0])


def _shape(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    torch._check(
        x.shape[-1] == codes.shape[1], lambda: f"x has {x.shape[-1]} columns, codes {codes.shape[1]}"
    )
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


def _plain(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute as the reference with x's own leading sizes: no reshape that a compiler would have to prove."""
    q, step = to_float8(x.float())
    y = F.linear(q.float(), codes.float()) * step * scale.float()
    return (y if bias is None else y + bias.float()).to(x.dtype)


define(
    "linear_fp8(Tensor x, Tensor codes, Tensor scale, Tensor? bias=None) -> Tensor", _linear, _shape, _plain
)
