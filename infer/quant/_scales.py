"""Scales and codes of a table format: for each 64 weights the signed scale of least squared error.

Taking the absolute maximum as scale is not the best: a smaller scale that clips one weight, or a negative one
that turns an asymmetric table round, often fits the other 63 better. The search is made on what is stored,
that is after the scale itself went to int8. Errors of all `FACTORS` at once are sums of rows of a fine
look-up table over the normalised weight, which `embedding_bag` adds at memory speed; the best then competes
exactly with its int8 neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels.packing import GROUP, LEVELS, TABLE_ROWS

BINS = 2048
# Candidate scales as shares of the group's largest magnitude, each with both signs.
FACTORS = torch.linspace(0.59, 1.16, 20)
# Weights worked on at a time, so that what is between stays in the processor's cache.
PIECE = 1 << 18


def fit(weight: Tensor, table: Tensor, importance: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """float32 [R, K], tables [T, C] ascending in ±1 → codes uint8 [R, K], scale int8 [R, K/64], row_scale [R].

    `importance` [K], the mean square of each input column, weighs the errors. Rows are independent.
    """
    rows = max(PIECE // weight.shape[1] // TABLE_ROWS, 1) * TABLE_ROWS
    parts = []
    for start in range(0, weight.shape[0], rows):
        stop = min(start + rows, weight.shape[0])
        tables = table if table.shape[0] == 1 else table[start // TABLE_ROWS : -(-stop // TABLE_ROWS)]
        parts.append(_fit_piece(weight[start:stop], tables, importance))
    codes, scale, row_scale = (torch.cat(part) for part in zip(*parts, strict=True))
    return codes, scale, row_scale


def _fit_piece(weight: Tensor, table: Tensor, importance: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    num_rows = weight.shape[0]
    grouped = weight.reshape(num_rows, -1, GROUP)
    largest = grouped.abs().amax(-1)
    unit = grouped / torch.where(largest > 0, largest, 1)[..., None]
    weights = None if importance is None else _group_weights(importance, num_rows)
    lookup = nearest_values(table)
    offset = _table_offset(num_rows, table.shape[0])
    factor = _best_factor(unit, lookup, offset, weights)
    row_scale = (factor.abs() * largest).amax(-1)
    per_level = row_scale / LEVELS
    # In units of the group's largest magnitude, one step of the int8 scale; 0 where all weights are.
    level = torch.where(largest > 0, per_level[:, None] / torch.where(largest > 0, largest, 1), 0)
    start = (
        torch.where(level > 0, factor / torch.where(level > 0, level, 1), 0).round().clamp(-LEVELS, LEVELS)
    )
    scale = _best_level(unit, start, level, lookup, offset, weights)
    codes = nearest_codes(_divide(unit, scale * level), table)
    return codes.reshape(weight.shape), scale.to(torch.int8), row_scale


def _group_weights(importance: Tensor, num_rows: int) -> Tensor:
    relative = importance.float() / importance.float().mean().clamp_min(torch.finfo(torch.float32).tiny)
    return relative.reshape(1, -1, GROUP).expand(num_rows, -1, -1)


def _table_offset(num_rows: int, num_tables: int) -> Tensor:
    """Where each row's table starts in a flattened [T, BINS] look-up; int32 [R, 1, 1]."""
    if num_tables == 1:
        return torch.zeros((), dtype=torch.int32)
    return (torch.arange(num_rows, dtype=torch.int32) // TABLE_ROWS * BINS)[:, None, None]


def _bin(values: Tensor) -> Tensor:
    """The int32 bin of values; ±1 are the ends and what is beyond belongs to them."""
    return (values * (BINS // 2) + BINS // 2).clamp_(0, BINS - 1).to(torch.int32)


def _centres() -> Tensor:
    return (torch.arange(BINS) + 0.5) / (BINS // 2) - 1


def nearest_values(table: Tensor) -> Tensor:
    """The entry of each table nearest to each bin's centre: [T, C] → [T, BINS]."""
    bounds = (table[:, 1:] + table[:, :-1]) / 2
    centres = _centres().expand(table.shape[0], -1).contiguous()
    return table.gather(1, torch.searchsorted(bounds, centres))


def nearest_codes(values: Tensor, table: Tensor) -> Tensor:
    """uint8 index of the nearest entry: values [R, G, 64] by comparison with every midpoint, so exactly."""
    bounds = (table[:, 1:] + table[:, :-1]) / 2
    if table.shape[0] > 1:
        bounds = bounds.repeat_interleave(TABLE_ROWS, 0)[: values.shape[0]]
    codes = torch.zeros(values.shape, dtype=torch.uint8)
    for bound in bounds.unbind(1):
        codes += values > bound[:, None, None]
    return codes


def _best_factor(unit: Tensor, lookup: Tensor, offset: Tensor, weights: Tensor | None) -> Tensor:
    """The signed share of the largest magnitude that fits best, before int8: [R, G]."""
    factors = torch.cat([FACTORS, -FACTORS])
    centres = _centres()[:, None]
    index = _bin(centres / factors)
    fitted = lookup.index_select(1, index.reshape(-1)).reshape(-1, *index.shape) * factors
    errors = (centres - fitted).square().reshape(-1, len(factors))
    bags = (_bin(unit) + offset).reshape(-1, GROUP)
    each = None if weights is None else weights.reshape(-1, GROUP)
    total = F.embedding_bag(bags, errors, mode="sum", per_sample_weights=each)
    return factors[total.argmin(-1)].reshape(unit.shape[:2])


def _divide(unit: Tensor, scale: Tensor) -> Tensor:
    return unit * torch.where(scale != 0, scale, 1).reciprocal()[..., None]


def _best_level(
    unit: Tensor, start: Tensor, level: Tensor, lookup: Tensor, offset: Tensor, weights: Tensor | None
) -> Tensor:
    """Of an int8 scale and its neighbours, the one with the smallest error: [R, G] float."""
    best, least = start, torch.full_like(start, torch.inf)
    flat = lookup.reshape(-1)
    for step in (0, -1, 1):
        scale = (start + step).clamp(-LEVELS, LEVELS)
        index = _bin(_divide(unit, scale * level)) + offset
        fitted = flat.index_select(0, index.reshape(-1)).reshape(unit.shape) * (scale * level)[..., None]
        error = (unit - fitted).square()
        total = (error if weights is None else error * weights).sum(-1)
        better = total < least
        best, least = torch.where(better, scale, best), torch.where(better, total, least)
    return best
