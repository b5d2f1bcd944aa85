"""int8 convolutions: `weight[o] = codes[o] * scale[o]`, codes int8 [O, I/groups, kh, kw] in ±127.

    conv2d_int8         activations to int8 per sample, on the fly
    conv2d_int8_static  activations to int8 by one calibrated step, clamped
    conv2d_int8_weight  activations stay float

x is [B, I, H, W]; padding is zeros. Numerics are those of `linear_int8`: exact integer sums, then
`* step * scale + bias` in float32, given in x's dtype. `y_scale` of the static form is the calibrated step of its
result: it changes nothing here, but a backend that hands results on as int8 needs it where they are added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .define_op import define
from .linear_int8 import EXACT_TERMS, LEVELS, TINY, to_grid

_OPTIONS = "int[2] stride=1, int[2] padding=0, int[2] dilation=1, int groups=1"  # as `F.conv2d` has them


def sample_step(x: Tensor) -> Tensor:
    """Symmetric int8 step of each sample: [B, I, H, W] float32 → [B, 1, 1, 1]."""
    return (x.abs().amax((1, 2, 3), keepdim=True) / LEVELS).clamp_min(TINY)


Product = Callable[
    ..., Tensor
]  # of integers as float32, codes and `_OPTIONS`; torch leaves out the last defaults


def exact_conv2d(q: Tensor, codes: Tensor, *options: Any) -> Tensor:
    """Integer sums, rounded once to float32; in float64 where float32 may be inexact (terms, Winograd)."""
    exact = q.device.type == "cpu" and codes[0].numel() <= EXACT_TERMS
    kind = torch.float32 if exact else torch.float64
    return F.conv2d(q.to(kind), codes.to(kind), None, *options).float()


def plain_conv2d(q: Tensor, codes: Tensor, *options: Any) -> Tensor:
    """One float32 product, for backends that compile plain operators; exact up to `EXACT_TERMS` products."""
    return F.conv2d(q, codes.float(), None, *options)


def _finish(sums: Tensor, step: Tensor, scale: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    y = sums * step * scale.float()[:, None, None]
    y = y if bias is None else y + bias.float()[:, None, None]
    return y.to(x.dtype).contiguous()


def _dynamic(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *options: Any,
    product: Product = exact_conv2d,
) -> Tensor:
    values = x.float()
    step = sample_step(values)
    return _finish(product(to_grid(values, step), codes, *options), step, scale, bias, x)


def _static(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    x_scale: Tensor,
    bias: Tensor | None = None,
    *options: Any,  # and `y_scale`
    product: Product = exact_conv2d,
) -> Tensor:
    step = x_scale.float()
    return _finish(product(to_grid(x.float(), step), codes, *options[:4]), step, scale, bias, x)


def _weight_only(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None, *options: Any
) -> Tensor:
    weight = codes.float() * scale.float()[:, None, None, None]
    added = None if bias is None else bias.float()
    return F.conv2d(x.float(), weight, added, *options).to(x.dtype).contiguous()


def output_size(
    image: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """Return height and width of a convolution's output; sizes may be symbolic."""
    return [(image[i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in (0, 1)]


def _shape(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    torch._check(x.dim() == 4, lambda: f"x has {x.dim()} dimensions, not batch, channels, height, width")
    torch._check(
        x.shape[1] == codes.shape[1] * groups,
        lambda: f"x has {x.shape[1]} channels, codes {codes.shape[1]} in {groups} groups",
    )
    sizes = output_size(x.shape[2:], codes.shape[2:], stride, padding, dilation)
    return x.new_empty((x.shape[0], codes.shape[0], *sizes))


def _shape_static(x: Tensor, codes: Tensor, scale: Tensor, x_scale: Tensor, *rest: Any) -> Tensor:
    return _shape(x, codes, scale, *rest[:5])


define(
    f"conv2d_int8(Tensor x, Tensor codes, Tensor scale, Tensor? bias=None, {_OPTIONS}) -> Tensor",
    _dynamic,
    _shape,
    partial(_dynamic, product=plain_conv2d),
)
define(
    "conv2d_int8_static(Tensor x, Tensor codes, Tensor scale, Tensor x_scale, Tensor? bias=None, "
    f"{_OPTIONS}, Tensor? y_scale=None) -> Tensor",
    _static,
    _shape_static,
    partial(_static, product=plain_conv2d),
)
define(
    f"conv2d_int8_weight(Tensor x, Tensor codes, Tensor scale, Tensor? bias=None, {_OPTIONS}) -> Tensor",
    _weight_only,
    _shape,
    _weight_only,
)
