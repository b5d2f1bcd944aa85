"""Linear layers on weights packed for this CPU, which `prepack` puts in place of the portable operators.

    linear_lut4_packed          `linear_codes` in the layout `lut` of 2 to 4 bits, activations to int8 for each group of
                                64 columns
    linear_groupwise_packed     `linear_codes` in the layout `groupwise`, activations the same, or for each 32 columns
                                where the weight has a scale for 32
    linear_int8_packed          `linear_int8_static`, the same numbers; without x_scale `linear_int8`, but with
                                activations on an asymmetric grid for each row: half the error after GELU or ReLU
    linear_int8_balanced_packed the same of x times a number for each column
    linear_int8_weight_packed   `linear_int8_weight`

x is [..., K] float32 on the CPU, packed operands come from `kernels.cpu.weight_layout`. Only the native
library computes them; the slow twins are the portable operators and, where rounding differs, `lut4_twin`,
`groupwise_twin` and `int8_twin` here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .bitpack import GROUP, unpack
from .coded_weight import CodedWeight
from .define_op import declare
from .linear_int8 import LEVELS, TINY, exact_matmul, to_grid


def rounded_table(table: Tensor, top: int = LEVELS) -> tuple[Tensor, Tensor]:
    """Round tables [T, C] to int8 [T, C]; also return the value of 127, float32 [T].

    The largest entry takes the level of 96 to `top` that loses least, so that uniform tables (int4) stay exact.
    """
    exact = table.double()
    largest = exact.abs().amax(1, keepdim=True)
    unit = exact / torch.where(largest > 0, largest, 1)
    best, level = torch.full_like(largest, torch.inf), torch.full_like(largest, top)
    for candidate in range(top, 95, -1):
        error = (unit * candidate - (unit * candidate).round()).div(candidate).square().sum(1, keepdim=True)
        level = torch.where(error < best * 0.99, candidate, level)
        best = torch.where(error < best * 0.99, error, best)
    return (unit * level).round().to(torch.int8), (largest * LEVELS / level).squeeze(1).float()


def lut4_twin(x: Tensor, weight: CodedWeight, bias: Tensor | None = None) -> Tensor:
    """Compute `linear_lut4_packed` from the portable tensors: x [..., K] → [..., N].

    Tables are rounded to int8 and so is each group of 64 columns of x, whatever the groups of the weight; the integer
    sums are exact.
    """
    codes, table, scale, row_scale = weight.lut_tensors()
    rows = x.float().reshape(-1, x.shape[-1])
    index = unpack(codes, weight.bits).long()
    rounded, factor = rounded_table(table)
    owner = weight.table_of_rows()
    entries = rounded[owner[:, None], index]
    total = rows.new_zeros((rows.shape[0], codes.shape[0]))
    steps = (rows.reshape(len(rows), -1, GROUP).abs().amax(2) / LEVELS).clamp_min(TINY)
    size = weight.group
    for g in range(scale.shape[1]):
        columns = slice(g * size, (g + 1) * size)
        step = steps[:, g * size // GROUP, None]
        sums = exact_matmul(to_grid(rows[:, columns], step), entries[:, columns])
        total += sums * (scale[:, g].float() * step)
    y = total * (row_scale.float() * factor[owner] / LEVELS**2)
    y = y if bias is None else y + bias.float()
    return y.reshape(*x.shape[:-1], codes.shape[0])


def groupwise_twin(x: Tensor, weight: CodedWeight, bias: Tensor | None = None) -> Tensor:
    """Compute `linear_groupwise_packed` from the portable tensors: x float32 [..., K] → [..., N].

    The table is rounded to int8, and so is each group of 64 columns of x, or of 32 where the weight has groups of 32;
    codes without a table are at least -127.
    """
    rows = x.float().reshape(-1, x.shape[-1])
    shared = 32 if weight.group == 32 else GROUP  # columns of x that share a step
    steps = (
        (rows.reshape(len(rows), -1, shared).abs().amax(2) / LEVELS)
        .clamp_min(TINY)
        .repeat_interleave(shared, 1)
    )
    q = to_grid(rows, steps) * steps
    if weight.table is None:
        weight = weight._replace(codes=weight.codes.clamp(min=-LEVELS))
    else:
        rounded, factor = rounded_table(weight.table)
        weight = weight._replace(table=rounded.float() * (factor / LEVELS)[:, None])
    y = (q.double() @ weight.decode().double().t()).float()
    y = y if bias is None else y + bias.float()
    return y.reshape(*x.shape[:-1], weight.num_rows)


def int8_twin(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `linear_int8_packed` without x_scale from int8 codes [N, K] and scale [N]: x [..., K] → [..., N].

    Zero is on the grid of every row, so that zeros (padding, ReLU) stay exact; -128 is not, because AVX2 can't
    negate it.
    """
    rows = x.float().reshape(-1, x.shape[-1])
    low, high = rows.amin(1, keepdim=True).clamp_max(0), rows.amax(1, keepdim=True).clamp_min(0)
    step = ((high - low) / (2 * LEVELS)).clamp_min(TINY)
    zero = (-LEVELS - low / step).round().clamp(-LEVELS, LEVELS)
    q = ((rows / step).round() + zero).clamp(-LEVELS, LEVELS)
    sums = q.double() @ codes.double().t() - zero.double() * codes.double().sum(1)
    y = sums.float() * step * scale.float()
    y = y if bias is None else y + bias.float()
    return y.reshape(*x.shape[:-1], codes.shape[0])


def _shape(x: Tensor, *rest: object) -> Tensor:
    features = next(value for value in rest if isinstance(value, int))
    return x.new_empty((*x.shape[:-1], features))


def _last_shape(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], rest[-1]))


declare(
    "linear_lut4_packed(Tensor x, Tensor codes, Tensor scale, Tensor table, Tensor row_scale, Tensor? bias, "
    "int out_features) -> Tensor",
    _shape,
)
declare(
    "linear_groupwise_packed(Tensor x, Tensor codes, Tensor scale, Tensor table, Tensor? bias, int layout, "
    "int out_features) -> Tensor",
    _last_shape,
)
declare(
    "linear_int8_packed(Tensor x, Tensor codes, Tensor scale, Tensor row_sum, Tensor? x_scale, Tensor? bias, "
    "int out_features, int in_features) -> Tensor",
    _shape,
)
declare(
    "linear_int8_balanced_packed(Tensor x, Tensor codes, Tensor scale, Tensor row_sum, Tensor x_multiplier, "
    "Tensor? bias, int out_features, int in_features) -> Tensor",
    _shape,
)
declare(
    "linear_int8_weight_packed(Tensor x, Tensor codes, Tensor scale, Tensor? bias, int out_features, "
    "int in_features) -> Tensor",
    _shape,
)
