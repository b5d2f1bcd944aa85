"""Trainable form of a weight in a table format: group scales, row scales and tables, and perhaps its codes.

A weight is `table[code] * level / 127 * row_scale`. Levels are rounded to int8 and, where codes are trained, positions
between table entries to the nearest; both roundings pass the gradient straight through (Bengio et al. 2013, arXiv
1308.3432; scales as in LSQ, Esser et al. 2020, arXiv 1902.08153). The forward pass uses the rounded values, so that
the packed tensors hold exactly what was trained.

Positions that find no code of least loss come to rest at a threshold, and their codes flip with every step, however
small: Nagel et al. 2022 (arXiv 2203.11086). Codes are therefore frozen at random one after another, and those that
are still free make up for them, as in incremental quantization (Zhou et al. 2017, arXiv 1702.03044).

Parameters are changes from the given tensors, in units in which one learning rate fits all; positions themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...compress.calibration.group_scales import midpoints, table_values
from ...kernels.ops.bitpack import LEVELS, TABLE_ROWS, bits_of, group_of, pack, unpack

PARTS = frozenset({"codes", "table", "scale", "row_scale"})
LEVEL_UNIT = float(LEVELS)  # of a level per unit of its parameter: the rate is a share of the largest
POSITION_UNIT = 5.0  # of codes
INSIDE = 1e-3  # how far inside its code a position begins, in codes
RANKS = 256


class TableWeight(nn.Module):
    """Trainable weight [N, K] that begins as exactly the packed one.

    With `original`, the float weight [N, K], codes are trained too: a position is the original between the thresholds
    of its code, mirrored at the nearer one where it lies outside. Without it the codes stay.
    """

    codes: Tensor
    table: Tensor
    level: Tensor
    row_scale: Tensor
    rank: Tensor

    def __init__(self, tensors: Mapping[str, Tensor], original: Tensor | None = None) -> None:
        super().__init__()
        table, scale, row_scale = tensors["table"], tensors["scale"], tensors["row_scale"]
        self.bits, self.group = bits_of(table), group_of(tensors["codes"], table, scale)
        codes = unpack(tensors["codes"], self.bits)
        self.position = None
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
        weight: Tensor = _Decode.apply(
            self.position, table, self._steps(level, row_scale), self.codes, self.group
        )
        return weight

    @torch.no_grad()
    def freeze(self, share: float) -> None:
        """Keep this share of the codes until the next step: their positions return to the middle of their codes."""
        if self.position is not None and share > 0:
            whole = (self.position * POSITION_UNIT).round_().div_(POSITION_UNIT)
            self.position.copy_(torch.where(self.rank < share * RANKS, whole, self.position))

    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """Return the packed tensors of `forward`'s weight: tables ascending, their largest magnitude 1."""
        table, level, row_scale = self._values()
        ascending, order = table.sort(1)
        top = table.abs().amax(1)
        top = torch.where(top > 0, top, 1)
        codes = self.codes if self.position is None else codes_at(self.position, table)
        codes = table_values(codes.long(), order.argsort(1))
        return {
            "codes": pack(codes.to(torch.uint8), self.bits),
            "table": ascending / top[:, None],
            "scale": level.to(torch.int8),
            "row_scale": row_scale * _of_rows(top, len(row_scale)),
        }


def codes_at(position: Tensor, table: Tensor) -> Tensor:
    """Return the codes uint8 [N, K] of positions in units of `POSITION_UNIT`."""
    return (position * POSITION_UNIT).round_().clamp_(0, table.shape[1] - 1).to(torch.uint8)


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


class _Decode(torch.autograd.Function):
    """Decode codes, or those of positions; entries are looked up again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, position: Tensor | None, table: Tensor, steps: Tensor, codes: Tensor, group: int
    ) -> Tensor:
        codes = codes if position is None else codes_at(position, table)
        ctx.save_for_backward(codes, table, steps)
        ctx.trains_codes, ctx.group = position is not None, group
        values = table_values(codes.long(), table)
        return (values.reshape(len(codes), -1, group) * steps[..., None]).reshape(codes.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        codes, table, steps = ctx.saved_tensors
        index = codes.long()
        grouped = gradient.reshape(len(codes), -1, ctx.group)
        of_steps = (grouped * table_values(index, table).reshape(grouped.shape)).sum(-1)
        of_values = (grouped * steps[..., None]).reshape(codes.shape)
        of_table = _by_entry(index, of_values, table) if ctx.needs_input_grad[1] else None
        return (of_values if ctx.trains_codes else None), of_table, of_steps, None, None


def _by_entry(codes: Tensor, gradient: Tensor, table: Tensor) -> Tensor:
    """Sum a gradient [N, K] by the table entry that each weight has: [T, C]."""
    tables, entries = table.shape
    if tables > 1:
        codes = codes + (torch.arange(len(codes), device=codes.device) // TABLE_ROWS * entries)[:, None]
    sums = torch.bincount(codes.reshape(-1), gradient.reshape(-1), minlength=tables * entries)
    return sums.reshape(tables, entries).to(gradient.dtype)
