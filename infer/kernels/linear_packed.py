"""The same layers on weights packed for the CPU at hand: what `prepack` puts in place of the portable operators.

    linear_lut4_packed          `linear_lut` of 2 to 4 bits, activations to int8 for each group of 64 columns
    linear_int8_packed          `linear_int8` (x_scale absent) and `linear_int8_static`, the same numbers
    linear_int8_weight_packed   `linear_int8_weight`

x is [..., K] float32 on the CPU, packed operands come from `native.pack_lut4` and `native.pack_int8`. Only the native
library computes them; the slow twins are the portable operators and, for the rounding that `linear_lut4_packed`
adds, `lut4_twin` here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._library import declare
from .linear_int8 import LEVELS, TINY, exact_matmul, to_grid
from .packing import GROUP, TABLE_ROWS, bits_of, unpack


def lut4_twin(
    x: Tensor, codes: Tensor, table: Tensor, scale: Tensor, row_scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """What `linear_lut4_packed` computes, from the portable tensors of `packing.py`: x [..., K] → [..., N].

    Tables are rounded to int8 and so is each group of 64 columns of x; the integer sums are exact.
    """
    rows = x.float().reshape(-1, x.shape[-1])
    index = unpack(codes, bits_of(table)).long()
    rounded = (table.float() * LEVELS).round().clamp(-LEVELS, LEVELS).to(torch.int8)
    owner = (
        torch.arange(codes.shape[0]) // TABLE_ROWS if table.shape[0] > 1 else torch.zeros_like(index[:, 0])
    )
    weight = rounded[owner[:, None], index]
    total = rows.new_zeros((rows.shape[0], codes.shape[0]))
    for g in range(scale.shape[1]):
        columns = slice(g * GROUP, (g + 1) * GROUP)
        step = (rows[:, columns].abs().amax(1, keepdim=True) / LEVELS).clamp_min(TINY)
        sums = exact_matmul(to_grid(rows[:, columns], step), weight[:, columns])
        total += sums * (scale[:, g].float() * step)
    y = total * (row_scale.float() / LEVELS**2)
    y = y if bias is None else y + bias.float()
    return y.reshape(*x.shape[:-1], codes.shape[0])


def _shape(x: Tensor, *rest: object) -> Tensor:
    features = next(value for value in rest if isinstance(value, int))
    return x.new_empty((*x.shape[:-1], features))


declare(
    "linear_lut4_packed(Tensor x, Tensor codes, Tensor scale, Tensor table, Tensor row_scale, Tensor? bias, "
    "int out_features) -> Tensor",
    _shape,
)
declare(
    "linear_int8_packed(Tensor x, Tensor codes, Tensor scale, Tensor? x_scale, Tensor? bias, int out_features, "
    "int in_features) -> Tensor",
    _shape,
)
declare(
    "linear_int8_weight_packed(Tensor x, Tensor codes, Tensor scale, Tensor? bias, int out_features, "
    "int in_features) -> Tensor",
    _shape,
)
