"""Differentiable decoding of a weight in a table format, from codes or from positions between table entries.

Rows are decoded in pieces that stay in the cache. The gradient of a weight goes straight through to its position
(Bengio et al. 2013, arXiv 1308.3432), to the entry that it is nearest to, and to the scale of its group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...kernels.ops.bitpack import TABLE_ROWS

POSITION_UNIT = 5.0  # of codes
RAMP = 0.2  # width of the ramp between two codes at the begin of a run, in codes
PIECE = 1 << 16  # values decoded at a time


def codes_at(position: Tensor, entries: int) -> Tensor:
    """Return the codes uint8 of positions in units of `POSITION_UNIT`."""
    return (position * POSITION_UNIT).round_().clamp_(0, entries - 1).to(torch.uint8)


class DecodeTable(torch.autograd.Function):
    """Return table entries times the scale of each group, float32 [N, K].

    position float32 [N, K] or None: codes uint8 [N, K] are used; table [T, C] of `per_table` rows each, T = 1: of all;
    steps float32 [N, K / group]. With a `width` above 0 a value goes from one entry to the next on a ramp of so many
    codes around the threshold, else at it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        position: Tensor | None,
        codes: Tensor,
        table: Tensor,
        steps: Tensor,
        group: int,
        width: float,
        per_table: int,
    ) -> Tensor:
        ctx.group, ctx.width, ctx.per_table, ctx.trains_codes = group, width, per_table, position is not None
        origin = codes if position is None else position
        weight = torch.empty(origin.shape, dtype=table.dtype, device=origin.device)
        for rows in pieces(origin):
            own = _tables(table, rows, per_table)
            part = _values(origin[rows], own, width, per_table).reshape(*steps[rows].shape, group)
            weight[rows] = part.mul_(steps[rows][..., None]).reshape(len(part), -1)
        ctx.save_for_backward(origin, table, steps, weight)
        return weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        origin, table, steps, weight = ctx.saved_tensors
        of_values = torch.empty_like(weight) if ctx.trains_codes else None
        of_steps, of_table = torch.empty_like(steps), torch.zeros_like(table)
        for rows in pieces(origin):
            own, scale = _tables(table, rows, ctx.per_table), steps[rows][..., None]
            shape = (*steps[rows].shape, ctx.group)
            values, grouped = weight[rows].reshape(shape), gradient[rows].reshape(shape)
            if bool((scale == 0).any()):
                values = _values(origin[rows], own, ctx.width, ctx.per_table).reshape(shape)
                of_steps[rows] = (grouped * values).sum(-1)
            else:
                of_steps[rows] = (grouped * values).sum(-1) / steps[rows]
            part = (grouped * scale).reshape(len(grouped), -1)
            if of_values is not None:
                of_values[rows] = part
            if ctx.needs_input_grad[2]:
                nearest = codes_at(origin[rows], table.shape[1]) if ctx.trains_codes else origin[rows]
                _tables(of_table, rows, ctx.per_table).add_(_by_entry(nearest, part, own, ctx.per_table))
        return of_values, None, of_table, of_steps, None, None, None


def pieces(weight: Tensor) -> list[slice]:
    """Return slices of rows [N, K] of about `PIECE` values, each of whole tables."""
    rows = max(PIECE // max(weight.shape[1], 1) // TABLE_ROWS, 1) * TABLE_ROWS
    return [slice(start, min(start + rows, len(weight))) for start in range(0, len(weight), rows)]


def _tables(table: Tensor, rows: slice, per_table: int) -> Tensor:
    """Return the tables of these rows, a view."""
    return table if len(table) == 1 else table[rows.start // per_table : -(-rows.stop // per_table)]


def _values(origin: Tensor, table: Tensor, width: float, per_table: int) -> Tensor:
    """Return the table's values of codes, or of positions: [R, K]."""
    if not origin.is_floating_point():
        return _entries(origin, table, per_table)
    if not width:
        return _entries(codes_at(origin, table.shape[1]), table, per_table)
    place = origin * POSITION_UNIT
    low = place.floor().clamp_(0, table.shape[1] - 2)
    share = place.sub_(low).sub_(0.5).div_(width).add_(0.5).clamp_(0, 1)
    index = low.to(torch.uint8)
    return _entries(index, table, per_table).addcmul_(_entries(index, table.diff(dim=1), per_table), share)


def _entries(index: Tensor, table: Tensor, per_table: int) -> Tensor:
    """Look up uint8 indices [R, K] in the tables of their rows."""
    if len(table) == 1:
        return table[0].index_select(0, index.reshape(-1).to(torch.int32)).reshape(index.shape)
    return table.repeat_interleave(per_table, 0)[: len(index)].gather(1, index.long())


def _by_entry(codes: Tensor, gradient: Tensor, table: Tensor, per_table: int) -> Tensor:
    """Sum a gradient [R, K] by the table entry that each weight has: [T, C]."""
    tables, entries = table.shape
    index = codes.to(torch.int32)
    if tables > 1:
        index = index + (torch.arange(len(codes), device=codes.device) // per_table * entries)[:, None].int()
    sums = torch.bincount(index.reshape(-1), gradient.reshape(-1), minlength=tables * entries)
    return sums.reshape(tables, entries).to(gradient.dtype)
