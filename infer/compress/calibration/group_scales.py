"""Scales and codes of table formats: per group of weights the signed scale of least squared error.

Taking the absolute maximum as scale is not the best: a smaller scale that clips one weight, or a negative one
that turns an asymmetric table round, often fits the others better. Each of `FACTORS` with both signs gives codes;
the best scale for given codes is least squares, and the codes whose scale leaves the smallest error win. That scale
goes to int8, where it competes exactly with its neighbours. The native routine and `fit_slowly` give equal bits: both
add in the order of the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.cpu import scale_search as native
from ...kernels.ops.bitpack import GROUP, LEVELS, TABLE_ROWS

# Candidate scales as shares of the group's largest magnitude, each with both signs.
FACTORS = torch.linspace(0.59, 1.16, native.SHARES // 2)
# Columns that calibration never saw move still weigh a little, so that their scale has a best value.
LEAST_IMPORTANCE = 1e-4
# Weights worked on at a time by the slow form, so that what is between stays in the processor's cache.
PIECE = 1 << 16


def fit(
    weight: Tensor, table: Tensor, importance: Tensor | None, group: int = GROUP
) -> tuple[Tensor, Tensor, Tensor]:
    """Fit float32 [R, K] to tables [T, C] in ±1 → codes uint8 [R, K], scale int8 [R, K/group], row_scale [R].

    `importance` [K], the mean square of each input column, weighs the errors. Rows are independent; T is 1, or one
    table for each `TABLE_ROWS` rows.
    """
    weights = relative_importance(importance, weight.shape[1])
    if native.why_not() is None:
        return native.fit(weight, table, midpoints(table), weights, inverse_shares(), group)
    return fit_slowly(weight, table, weights, group)


def relative_importance(importance: Tensor | None, columns: int) -> Tensor:
    """Normalize importance to float32 [K] with mean 1, nowhere 0."""
    if importance is None:
        return torch.ones(columns)
    mean = importance.float().mean().clamp_min(torch.finfo(torch.float32).tiny)
    return (importance.float() / mean).clamp_min(LEAST_IMPORTANCE)


def inverse_shares() -> Tensor:
    return torch.cat([FACTORS, -FACTORS]).reciprocal()


def midpoints(table: Tensor) -> Tensor:
    """Return the decision thresholds of tables [T, C] → [T, C - 1]; above one belongs to the higher entry."""
    return ((table[:, 1:] + table[:, :-1]) / 2).contiguous()


def fit_slowly(
    weight: Tensor, table: Tensor, weights: Tensor, group: int = GROUP
) -> tuple[Tensor, Tensor, Tensor]:
    """Fit in plain torch, as the reference of `fit`; `weights` [K] are relative."""
    rows = max(PIECE // weight.shape[1] // TABLE_ROWS, 1) * TABLE_ROWS
    parts = []
    for start in range(0, weight.shape[0], rows):
        stop = min(start + rows, weight.shape[0])
        tables = table if table.shape[0] == 1 else table[start // TABLE_ROWS : -(-stop // TABLE_ROWS)]
        parts.append(_fit_piece(weight[start:stop], tables, weights.reshape(1, -1, group)))
    codes, scale, row_scale = (torch.cat(part) for part in zip(*parts, strict=True))
    return codes, scale, row_scale


def _fit_piece(weight: Tensor, table: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Fit one block of rows; `weights` is [1, groups, size of a group]."""
    grouped = weight.reshape(weight.shape[0], *weights.shape[1:])
    largest = grouped.abs().amax(-1)
    divisor = torch.where(largest > 0, largest, 1)
    unit = grouped / divisor[..., None]
    share = _best_share(unit, table, weights)
    row_scale = (share * largest).abs().amax(-1)
    # In units of the group's largest magnitude, one step of the int8 scale; 0 where all weights are.
    level = torch.where(largest > 0, (row_scale / LEVELS)[:, None] / divisor, 0)
    start = (share / torch.where(level > 0, level, 1)).round()
    scale = _best_level(unit, torch.where(level > 0, start, 0), level, table, weights)
    codes = nearest_codes(_divide(unit, (scale * level)[..., None]), table)
    return codes.reshape(weight.shape).to(torch.uint8), scale.to(torch.int8), row_scale


def nearest_codes(values: Tensor, table: Tensor) -> Tensor:
    """Return the int64 index of the nearest entry: values [R, …] → [R, …]; ties take the lower one."""
    bounds, flat = midpoints(table), values.reshape(values.shape[0], -1)
    if table.shape[0] == 1:
        return torch.bucketize(flat, bounds[0]).reshape(values.shape)
    bounds = bounds.repeat_interleave(TABLE_ROWS, 0)[: len(flat)]
    return torch.searchsorted(bounds, flat).reshape(values.shape)


def table_values(codes: Tensor, table: Tensor) -> Tensor:
    """Look up the table entries of int64 codes [R, …]."""
    if table.shape[0] == 1:
        return table[0][codes]
    tables = table.repeat_interleave(TABLE_ROWS, 0)[: len(codes)]
    return tables.gather(1, codes.reshape(len(codes), -1)).reshape(codes.shape)


def _best_share(unit: Tensor, table: Tensor, weights: Tensor) -> Tensor:
    """Return the signed share of the largest magnitude that fits best, before int8: [R, G]."""
    inverses = inverse_shares()
    along = square = unit.new_zeros((*unit.shape[:2], len(inverses)))
    for i in range(unit.shape[-1]):
        value = unit[..., i, None]
        fitted = table_values(nearest_codes(value * inverses, table), table)
        weighted = weights[..., i, None] * fitted
        along, square = along + weighted * value, square + weighted * fitted
    divisor = torch.where(square > 0, square, 1)
    gain = along * along / divisor
    best = gain.argmax(-1, keepdim=True)
    return (along / divisor).gather(-1, best)[..., 0]


def _divide(unit: Tensor, scale: Tensor) -> Tensor:
    return unit * torch.where(scale != 0, scale, 1).reciprocal()


def _best_level(unit: Tensor, start: Tensor, level: Tensor, table: Tensor, weights: Tensor) -> Tensor:
    """Return the best of the int8 scales around `start`: [R, G] float."""
    steps = torch.arange(native.STEPS) - native.STEPS // 2
    scales = (start[..., None] + steps).clamp(-LEVELS, LEVELS)
    sizes = scales * level[..., None]
    error = torch.zeros_like(sizes)
    for i in range(unit.shape[-1]):
        value = unit[..., i, None]
        fitted = table_values(nearest_codes(_divide(value, sizes), table), table)
        missed = value - fitted * sizes
        error = error + weights[..., i, None] * missed * missed
    return scales.gather(-1, error.argmin(-1, keepdim=True))[..., 0]
