"""int8 linear layers: `y = x @ weight.T + bias`, `weight[n, k] = codes[n, k] * scale[n]`, codes in ±127.

    linear_int8         activations to int8 per row (token), on the fly
    linear_int8_static  activations to int8 by one calibrated step, clamped
    linear_int8_weight  activations stay float

The integer products of the first two are exact, so that every machine gives the result of int32 accumulation:
`float32(sum of q * codes) * step * scale + bias`. It is given in x's dtype; between, all is float32.
A row of zeros gives the bias; NaN and infinity stay in their own row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .define_op import define

LEVELS = 127
TINY = torch.finfo(torch.float32).tiny
# The longest sum of products of two numbers in ±127 that every order of float32 additions gets exactly right.
EXACT_TERMS = 2**24 // LEVELS**2
EXPONENTS = (-126, 127)  # of the normal float32 that are powers of two


def row_step(x: Tensor) -> Tensor:
    """Symmetric int8 step of each row: [..., K] float32 → [..., 1]."""
    return (x.abs().amax(-1, keepdim=True) / LEVELS).clamp_min(TINY)


def to_grid(x: Tensor, step: Tensor) -> Tensor:
    """Round x / step to the integers of ±127 (halves to even), as float32; NaN stays NaN."""
    return (x / step).round().clamp(-LEVELS, LEVELS)


def halved(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes float16 [N, …] in ±2 and powers of two float32 [N] whose product is a weight [N, …], rounded."""
    rows = weight.float().reshape(weight.shape[0], -1)
    exponent = torch.frexp(rows.abs().amax(1)).exponent.clamp(*EXPONENTS)
    scale = torch.ldexp(torch.ones(len(rows)), exponent)
    return (rows / scale[:, None]).half().reshape(weight.shape), scale


def exact_matmul(q: Tensor, codes: Tensor) -> Tensor:
    """Multiply q [M, K] (integers as float32) by codes int8 [N, K]: int32 sums [M, N], rounded once to float32."""
    if q.shape[-1] <= EXACT_TERMS:
        return q @ codes.float().t()
    total = q.new_zeros((q.shape[0], codes.shape[0]), dtype=torch.float64)
    for start in range(0, q.shape[-1], EXACT_TERMS):
        block = slice(start, start + EXACT_TERMS)
        total += q[:, block] @ codes[:, block].float().t()
    return total.float()


def _finish(sums: Tensor, step: Tensor, scale: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    y = sums * step * scale.float()
    y = y if bias is None else y + bias.float()
    return y.to(x.dtype).reshape(*x.shape[:-1], y.shape[-1])


def _rows(x: Tensor) -> Tensor:
    return x.reshape(x.shape[:-1].numel(), x.shape[-1]).float()


def _dynamic(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    if x.shape[-1] == 0 or x.numel() == 0:
        return _weight_only(x, codes, scale, bias)
    rows = _rows(x)
    step = row_step(rows)
    return _finish(exact_matmul(to_grid(rows, step), codes), step, scale, bias, x)


def _static(x: Tensor, codes: Tensor, scale: Tensor, x_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    step = x_scale.float()
    return _finish(exact_matmul(to_grid(_rows(x), step), codes), step, scale, bias, x)


def _weight_only(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    y = F.linear(_rows(x), codes.float()) * scale.float()
    y = y if bias is None else y + bias.float()
    return y.to(x.dtype).reshape(*x.shape[:-1], codes.shape[0])


def _dynamic_plain(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """One float32 product: exact up to `EXACT_TERMS` columns; beyond, only sums above 2**24 are rounded."""
    step = row_step(x.float())
    y = F.linear(to_grid(x.float(), step), codes.float()) * step * scale.float()
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _static_plain(
    x: Tensor, codes: Tensor, scale: Tensor, x_scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    step = x_scale.float()
    y = F.linear(to_grid(x.float(), step), codes.float()) * step * scale.float()
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _weight_only_plain(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    if x.dtype == torch.float16:  # codes * x can leave float16; the scaled weight can't
        return F.linear(
            x,
            (codes.float() * scale.float()[:, None]).to(x.dtype),
            None if bias is None else bias.to(x.dtype),
        )
    y = F.linear(x, codes.to(x.dtype)) * scale.to(x.dtype)
    return y if bias is None else y + bias.to(x.dtype)


def _shape(x: Tensor, codes: Tensor, scale: Tensor, *rest: Tensor | None) -> Tensor:
    torch._check(
        x.shape[-1] == codes.shape[1], lambda: f"x has {x.shape[-1]} columns, codes {codes.shape[1]}"
    )
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


define(
    "linear_int8(Tensor x, Tensor codes, Tensor scale, Tensor? bias=None) -> Tensor",
    _dynamic,
    _shape,
    _dynamic_plain,
)
define(
    "linear_int8_static(Tensor x, Tensor codes, Tensor scale, Tensor x_scale, Tensor? bias=None) -> Tensor",
    _static,
    _shape,
    _static_plain,
)
define(
    "linear_int8_weight(Tensor x, Tensor codes, Tensor scale, Tensor? bias=None) -> Tensor",
    _weight_only,
    _shape,
    _weight_only_plain,
)
