"""Linear layers on codes with scales: `linear_codes(x, *weight, bias)`, the tensors of `coded_weight` in order.

x is [..., K] of any float dtype and the result [..., N] has it. Weights are exact in the reference; the decomposition
multiplies in x's dtype, which accelerators have units for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .bitpack import unpack, unpack_arithmetic
from .coded_weight import CodedWeight
from .define_op import define

WEIGHT = (
    "Tensor codes, Tensor scale, Tensor? table, Tensor? minimum, Tensor? super_scale, Tensor? super_minimum"
)


def _linear(
    x: Tensor,
    *given: Any,
    unpacked: Callable[[Tensor, int], Tensor] = unpack,
    dtype: torch.dtype | None = torch.float32,
) -> Tensor:
    weight, bias = CodedWeight(*given[:6]), given[6] if len(given) > 6 else None
    kind = x.dtype if dtype is None else dtype
    parts = [F.linear(x.to(kind), part.decode(unpacked).to(kind)) for part in weight.blocks()]
    y = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    return (y if bias is None else y + bias.to(kind)).to(x.dtype)


def _shape(x: Tensor, *given: Any) -> Tensor:
    weight = CodedWeight(*given[:6])
    weight.check()
    columns = weight.columns
    torch._check(x.shape[-1] == columns, lambda: f"x has {x.shape[-1]} columns, codes {columns}")
    return x.new_empty((*x.shape[:-1], weight.num_rows))


define(
    f"linear_codes(Tensor x, {WEIGHT}, Tensor? bias=None) -> Tensor",
    _linear,
    _shape,
    partial(_linear, unpacked=unpack_arithmetic, dtype=None),
)
