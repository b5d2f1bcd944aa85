"""Trainable form of a weight in a table format: group scales, row scales and tables, and perhaps its codes.

A weight is `table[code] * level / 127 * row_scale`. Levels are rounded to int8 and, where codes are trained, latent
values to their nearest table entry; both roundings pass the gradient straight through (Bengio et al. 2013, arXiv
1308.3432; scales as in LSQ, Esser et al. 2020, arXiv 1902.08153). The forward pass uses the rounded values, so that
the packed tensors hold exactly what was trained.

Parameters are changes from the given tensors, in units in which one learning rate fits all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...compress.calibration.group_scales import midpoints, nearest_codes, table_values
from ...kernels.ops.bitpack import LEVELS, TABLE_ROWS, bits_of, group_of, pack, unpack

PARTS = frozenset({"codes", "table", "scale", "row_scale"})
LEVEL_UNIT = float(LEVELS)  # of a level per unit of its parameter: the rate is a share of the largest
LATENT_UNIT = 0.25
INSIDE = 1e-3  # how far inside its code's interval a latent value begins, as a share of it


class TableWeight(nn.Module):
    """Trainable weight [N, K] that begins as exactly the packed one.

    With `original`, the float weight [N, K], codes are trained too: latent values begin at it, as far as the given
    codes allow. Without it the codes stay.
    """

    codes: Tensor
    table: Tensor
    level: Tensor
    row_scale: Tensor
    latent: Tensor

    def __init__(self, tensors: Mapping[str, Tensor], original: Tensor | None = None) -> None:
        super().__init__()
        table, scale, row_scale = tensors["table"], tensors["scale"], tensors["row_scale"]
        self.bits, self.group = bits_of(table), group_of(tensors["codes"], table, scale)
        codes = unpack(tensors["codes"], self.bits)
        given = {"codes": codes, "table": table.clone(), "level": scale.float(), "row_scale": row_scale}
        if original is not None:
            given["latent"] = _latent(codes, table, self._steps(scale.float(), row_scale), original)
        for name, tensor in given.items():
            self.register_buffer(name, tensor, persistent=False)
        self.table_change = nn.Parameter(torch.zeros_like(table))
        self.level_change = nn.Parameter(torch.zeros_like(scale, dtype=torch.float32))
        self.row_change = nn.Parameter(torch.zeros_like(row_scale))
        self.latent_change = None if original is None else nn.Parameter(torch.zeros_like(self.latent))

    @staticmethod
    def _steps(level: Tensor, row_scale: Tensor) -> Tensor:
        """Return the scale of each group, float32 [N, K / group]."""
        return level * (row_scale / LEVELS)[:, None]

    def _values(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return table, int8 levels as float32, row scales and latent values (None where codes stay)."""
        table = self.table + self.table_change
        level: Tensor = _RoundLevels.apply(self.level + self.level_change * LEVEL_UNIT)
        row_scale = self.row_scale * (1 + self.row_change)
        latent = None if self.latent_change is None else self.latent + self.latent_change * LATENT_UNIT
        return table, level, row_scale, latent

    def forward(self) -> Tensor:
        """Return the float32 weight [N, K], differentiable."""
        table, level, row_scale, latent = self._values()
        weight: Tensor = _Decode.apply(latent, table, self._steps(level, row_scale), self.codes, self.group)
        return weight

    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """Return the packed tensors of `forward`'s weight: tables ascending, their largest magnitude 1."""
        table, level, row_scale, latent = self._values()
        ascending, order = table.sort(1)
        top = table.abs().amax(1)
        top = torch.where(top > 0, top, 1)
        if latent is None:
            codes = table_values(self.codes.long(), order.argsort(1))
        else:
            codes = nearest_codes(latent, ascending)
        return {
            "codes": pack(codes.to(torch.uint8), self.bits),
            "table": ascending / top[:, None],
            "scale": level.to(torch.int8),
            "row_scale": row_scale * _of_rows(top, len(row_scale)),
        }


def _of_rows(per_table: Tensor, rows: int) -> Tensor:
    """Repeat a value of each table for the rows that use it: [T] → [rows], or [1]."""
    return per_table if len(per_table) == 1 else per_table.repeat_interleave(TABLE_ROWS)[:rows]


def _latent(codes: Tensor, table: Tensor, steps: Tensor, original: Tensor) -> Tensor:
    """Return latent values [N, K] that round to `codes`: the original's, moved into the interval of its code."""
    grouped = original.float().reshape(*steps.shape, -1)
    wanted = (grouped / torch.where(steps != 0, steps, 1)[..., None]).reshape(codes.shape)
    bounds, width = midpoints(table), (table[:, -1:] - table[:, :1]) / table.shape[1]
    low = table_values(codes.long(), torch.cat([table[:, :1] - width, bounds], 1))
    high = table_values(codes.long(), torch.cat([bounds, table[:, -1:] + width], 1))
    margin = (high - low) * INSIDE
    return torch.maximum(torch.minimum(wanted, high - margin), low + margin)


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
    """Decode codes, or latent values by their nearest entry; entries are looked up again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, latent: Tensor | None, table: Tensor, steps: Tensor, codes: Tensor, group: int
    ) -> Tensor:
        order = None
        if latent is not None:
            ascending, order = table.sort(1)
            codes = table_values(nearest_codes(latent, ascending), order).to(torch.uint8)
        ctx.save_for_backward(codes, table, steps)
        ctx.trains_codes, ctx.group = latent is not None, group
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
