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
from ...kernels.ops.bitpack import LEVELS, TABLE_ROWS, bits_of, group_of, pack, unpack
from .table_decoding import POSITION_UNIT, DecodeTable, codes_at, pieces

PARTS = frozenset({"codes", "table", "scale", "row_scale"})
LEVEL_UNIT = float(LEVELS)  # of a level per unit of its parameter: the rate is a share of the largest
INSIDE = 1e-3  # how far inside its code a position begins, in codes
RANKS = 256


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
        table, scale, row_scale = tensors["table"], tensors["scale"], tensors["row_scale"]
        self.bits, self.group = bits_of(table), group_of(tensors["codes"], table, scale)
        codes = unpack(tensors["codes"], self.bits)
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
            "row_scale": row_scale * _of_rows(top, len(row_scale)),
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
