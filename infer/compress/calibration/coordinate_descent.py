"""Coordinate descent on codes and group scales that error feedback found, under the same Hessian.

Error feedback rounds each column once, before it knows the errors of later ones. Here each group's scale, then each
of its codes, is set to the value of least error with everything else as it is, so that the error falls with each
change: Gauss-Seidel over columns, as QuantEase (Behdin et al. 2023, arXiv 2309.01885), here for tables and scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from ...kernels.ops.bitpack import GROUP, LEVELS, TABLE_ROWS
from .gptq import Factor
from .group_scales import nearest_codes, table_values

SWEEPS = 2  # of 4, the last two take less than a tenth of the gain
# Calibration rows for each column below which the Hessian is not descended on: its noise would be fitted.
FEWEST_ROWS = 2


def refine(
    weight: Tensor,
    table: Tensor,
    factors: Sequence[Factor],
    codes: Tensor,
    scale: Tensor,
    row_scale: Tensor,
    sweeps: int = SWEEPS,
) -> tuple[Tensor, Tensor]:
    """Lower the error of float32 `weight` [R, K]: codes uint8 [R, K] and scale int8 [R, K/group], both new.

    `table` [T, C] ascending and `row_scale` float32 [R] stay.
    """
    group, rows = weight.shape[1] // scale.shape[1], len(weight)
    padding = (0, 0, 0, -rows % TABLE_ROWS)
    weight, codes, scale = (F.pad(part, padding).contiguous() for part in (weight, codes, scale))
    codes, scale, row_scale = codes.clone(), scale.clone(), F.pad(row_scale, padding[2:])
    for part in factors:
        columns, groups = slice(part.start, part.stop), slice(part.start // group, part.stop // group)
        piece = _Piece(weight[:, columns], table, row_scale, group, _hessian(part))
        piece.descend(codes[:, columns], scale[:, groups], sweeps)
    return codes[:rows], scale[:rows]


@lru_cache(maxsize=1)  # the blocks of rows of one weight follow each other
def _hessian(part: Factor) -> Tensor:
    """Return the damped Hessian float32 [W, W] of a factor; columns without input have a diagonal of one."""
    return torch.cholesky_inverse(part.upper.double(), upper=True).float()


def _times(rows: Tensor, matrix: Tensor) -> Tensor:
    """Multiply [R, A] by [A, B] in blocks of `TABLE_ROWS` rows, so that a row's sums do not depend on R."""
    blocks = rows.reshape(-1, TABLE_ROWS, rows.shape[1])
    return torch.bmm(blocks, matrix.expand(len(blocks), -1, -1)).reshape(len(rows), -1)


class _Piece:
    """Columns of a weight that share a Hessian: `error` is (weight - rounded) · hessian."""

    def __init__(self, weight: Tensor, table: Tensor, row_scale: Tensor, group: int, hessian: Tensor) -> None:
        self.weight, self.table, self.group, self.hessian = weight, table, group, hessian
        self.per_level = row_scale / LEVELS

    def descend(self, codes: Tensor, scale: Tensor, sweeps: int) -> None:
        """Improve codes and scales in place."""
        steps = (scale.float() * self.per_level[:, None]).repeat_interleave(self.group, 1)
        rounded = table_values(codes.long(), self.table) * steps
        error = _times(self.weight - rounded, self.hessian)
        for _ in range(sweeps):
            for start in range(0, self.weight.shape[1], GROUP):
                chunk = slice(start, min(start + GROUP, self.weight.shape[1]))
                before = rounded[:, chunk].clone()
                for first in range(start, chunk.stop, self.group):
                    part = slice(first, first + self.group)
                    self._scale(rounded, error, chunk, part, codes, scale[:, first // self.group])
                    self._codes(rounded, error, chunk, part, codes, scale[:, first // self.group])
                change = rounded[:, chunk] - before
                kept = error[:, chunk].clone()  # kept up to date column by column
                error -= _times(change, self.hessian[chunk])
                error[:, chunk] = kept

    def _scale(
        self, rounded: Tensor, error: Tensor, chunk: slice, part: slice, codes: Tensor, level: Tensor
    ) -> None:
        """Set the scales int8 [R] of a group to the best for its codes."""
        values = table_values(codes[:, part].long(), self.table)
        curvature = (_times(values, self.hessian[part, part]) * values).sum(1) * self.per_level
        gain = (values * error[:, part]).sum(1) / torch.where(curvature > 0, curvature, torch.inf)
        wanted = (level.float() + gain).round().clamp(-LEVELS, LEVELS)
        change = values * ((wanted - level.float()) * self.per_level)[:, None]
        level.copy_(wanted.to(torch.int8))
        rounded[:, part] += change
        error[:, chunk] -= _times(change, self.hessian[part, chunk])

    def _codes(
        self, rounded: Tensor, error: Tensor, chunk: slice, part: slice, codes: Tensor, level: Tensor
    ) -> None:
        """Set the codes of a group, column after column."""
        steps = level.float() * self.per_level
        inverse = torch.where(steps != 0, steps, 1).reciprocal()
        for column in range(part.start, part.stop):
            wanted = rounded[:, column] + error[:, column] / self.hessian[column, column]
            found = nearest_codes((wanted * inverse)[:, None], self.table)
            codes[:, column] = found[:, 0].to(torch.uint8)
            value = table_values(found, self.table)[:, 0] * steps
            error[:, chunk] -= torch.outer(value - rounded[:, column], self.hessian[column, chunk])
            rounded[:, column] = value
