"""Trainable form of a weight in a table format: group scales, row scales and tables, and perhaps its codes.

A weight is `table[code] * level / 127 * row_scale`. Levels are rounded to int8 and, where codes are trained, positions
between table entries to the nearest; both roundings pass the gradient straight through (Bengio et al. 2013, arXiv
1308.3432; scales as in LSQ, Esser et al. 2020, arXiv 1902.08153).

Positions that find no code of least loss come to rest at a threshold, and their codes flip with every step, however
small: Nagel et al. 2022 (arXiv 2203.11086). Values therefore pass from one entry to the next over a ramp around the
threshold, whose width falls to 0 during training (soft rounding: Gong et al. 2019, arXiv 1908.05033). Codes are also
frozen at random one after another, and those that are still free make up for them, as in incremental quantization
(Zhou et al. 2017, arXiv 1702.03044).

Parameters are changes from the given tensors, in units in which one learning rate fits all; positions themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...compress.calibration.group_scales import midpoints, table_values
from ...kernels.ops.bitpack import LEVELS, TABLE_ROWS, pack, unpack
from ...kernels.ops.coded_weight import CodedWeight

LEVEL_UNIT = float(LEVELS)  # of a level per unit of its parameter: the rate is a share of the largest
INSIDE = 1e-3  # how far inside its code a position begins, in codes
RANKS = 256
POSITION_UNIT = 5.0  # of codes
RAMP = 0.2  # width of the ramp between two codes at the begin of a run, in codes
PIECE = 1 << 16  # values decoded at a time


class TableWeight(nn.Module):
    """Trainable weight [N, K] that begins as exactly the packed one.

    With `original`, the float weight [N, K], codes are trained too: a position is the original between the thresholds
    of its code, mirrored at the nearer one where it lies outside. Without it the codes stay. `width`: of ramps, in
    codes; without one the weight is what `tensors` packs.
    """

    codes: Tensor
    table: Tensor
    level: Tensor
    row_scale: Tensor
    rank: Tensor

    def __init__(self, tensors: Mapping[str, Tensor], original: Tensor | None = None) -> None:
        super().__init__()
        weight = CodedWeight.of(tensors)
        packed, table, scale, row_scale = weight.lut_tensors()
        self.bits, self.group = weight.bits, weight.group
        codes = unpack(packed, self.bits)
        self.position, self.width = None, 0.0
        if original is not None:
            begin = positions(codes, table, self._steps(scale.float(), row_scale), original)
            self.position = nn.Parameter(begin / POSITION_UNIT)
            self.register_buffer("rank", _ranks(codes), persistent=False)
        given = {"codes": codes, "table": table.clone(), "level": scale.float(), "row_scale": row_scale}
        for name, tensor in given.items():
            self.register_buffer(name, tensor, persistent=False)
        self.table_change = nn.Parameter(torch.zeros_like(table))
        self.level_change = nn.Parameter(torch.zeros_like(scale, dtype=torch.float32))
        self.row_change = nn.Parameter(torch.zeros_like(row_scale))

    @staticmethod
    def _steps(level: Tensor, row_scale: Tensor) -> Tensor:
        """Return the scale of each group, float32 [N, K / group]."""
        return level * (row_scale / LEVELS)[:, None]

    def _values(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return table, int8 levels as float32 and row scales."""
        table = self.table + self.table_change
        level: Tensor = _RoundLevels.apply(self.level + self.level_change * LEVEL_UNIT)
        return table, level, self.row_scale * (1 + self.row_change)

    def forward(self) -> Tensor:
        """Return the float32 weight [N, K], differentiable."""
        table, level, row_scale = self._values()
        steps = self._steps(level, row_scale)
        weight: Tensor = DecodeTable.apply(
            self.position, self.codes, table, steps, self.group, self.width, TABLE_ROWS
        )
        return weight

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows of `ids`, int64 [...], differentiable: [..., K]; only these are decoded."""
        used, index = ids.unique(return_inverse=True)
        table, level, row_scale = self._values()
        steps = self._steps(level[used], row_scale[used])
        table = table if len(table) == 1 else table[used // TABLE_ROWS]
        position = None if self.position is None else self.position.index_select(0, used)
        part: Tensor = DecodeTable.apply(position, self.codes[used], table, steps, self.group, self.width, 1)
        return part[index]

    @torch.no_grad()
    def freeze(self, share: float) -> None:
        """Keep this share of the codes until the next step: their positions return to the middle of their codes."""
        if self.position is None or share <= 0:
            return
        for rows in pieces(self.position):  # each stays in the cache
            part = self.position[rows]
            whole = (part * POSITION_UNIT).round_().div_(POSITION_UNIT)
            part.copy_(torch.where(self.rank[rows] < share * RANKS, whole, part))

    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """Return the packed tensors of `forward`'s weight: tables ascending, their largest magnitude 1."""
        table, level, row_scale = self._values()
        ascending, order = table.sort(1)
        top = table.abs().amax(1)
        top = torch.where(top > 0, top, 1)
        codes = self.codes if self.position is None else codes_at(self.position, table.shape[1])
        codes = table_values(codes.long(), order.argsort(1))
        return {
            "codes": pack(codes.to(torch.uint8), self.bits),
            "table": ascending / top[:, None],
            "scale": level.to(torch.int8),
            "super_scale": row_scale * _of_rows(top, len(row_scale)),
        }


def _ranks(codes: Tensor) -> Tensor:
    """Return the order in which codes are frozen, uint8 [N, K]: the same for each run."""
    make = torch.Generator().manual_seed(codes.numel())
    return torch.randint(RANKS, codes.shape, dtype=torch.uint8, generator=make).to(codes.device)


@torch.no_grad()
def positions(codes: Tensor, table: Tensor, steps: Tensor, original: Tensor) -> Tensor:
    """Return positions [N, K] that round to `codes`: where the original lies in its code's cell, mirrored into it.

    Error feedback moves a code away from the original's nearest; clamped to the threshold, all such positions would
    cross it with the first step.
    """
    grouped = original.float().reshape(*steps.shape, -1)
    wanted = (grouped / torch.where(steps != 0, steps, 1)[..., None]).reshape(codes.shape)
    bounds, index = midpoints(table), codes.long()
    low = table_values(index, torch.cat([2 * table[:, :1] - bounds[:, :1], bounds], 1))
    width = table_values(index, torch.cat([bounds, 2 * table[:, -1:] - bounds[:, -1:]], 1)) - low
    share = (wanted - low) / torch.where(width > 0, width, 1)
    share = torch.where(share < 0, (-share).clamp_max(0.5), share)
    share = torch.where(share > 1, (2 - share).clamp_min(0.5), share)
    return codes.float() - 0.5 + share.clamp(INSIDE, 1 - INSIDE)


def _of_rows(per_table: Tensor, rows: int) -> Tensor:
    """Repeat a value of each table for the rows that use it: [T] → [rows], or [1]."""
    return per_table if len(per_table) == 1 else per_table.repeat_interleave(TABLE_ROWS)[:rows]


class _RoundLevels(torch.autograd.Function):
    """Round to int8 levels; the gradient passes where the value is in range."""

    @staticmethod
    def forward(ctx: Any, level: Tensor) -> Tensor:
        ctx.save_for_backward(level)
        return level.round().clamp(-LEVELS, LEVELS)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (level,) = ctx.saved_tensors
        return gradient * (level.abs() <= LEVELS + 0.5)


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
