"""GPTQ error feedback (Frantar et al. 2022): a column's rounding error is compensated in later columns.

GPTQ (Frantar et al. 2022, arXiv 2210.17323) for any table: columns in order, their errors spread by the Cholesky
factor of the inverse Hessian `x.T @ x`, in groups whose scale is searched when their turn comes. Where the whole
Hessian has no room it is block-diagonal, and errors stay in their block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.ops.bitpack import GROUP, LEVELS
from .group_scales import fit, nearest_codes, table_values

# Of the mean diagonal, added to the diagonal: few rows leave the Hessian without full rank.
DAMPING = 0.01
# Room for scales that grow as errors arrive, as a share of a row's largest scale.
HEADROOM = 1.05


@dataclass(frozen=True, eq=False)
class Factor:
    """Upper Cholesky factor of an inverse Hessian, float32 [stop - start, stop - start], of these columns."""

    start: int
    upper: Tensor

    @property
    def stop(self) -> int:
        return self.start + len(self.upper)


def factor(start: int, hessian: Tensor) -> Factor:
    """Factor a Hessian, float [W, W] sum of outer products; columns without input take no part in feedback."""
    damped = hessian.double()
    diagonal = damped.diagonal()
    diagonal.add_(DAMPING * diagonal.mean())
    diagonal[diagonal == 0] = 1
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return Factor(start, torch.linalg.cholesky(inverse, upper=True).float())


Round = Callable[[int, Tensor], Tensor]  # column, its values now [R] → what they are rounded to
Begin = Callable[[int, Tensor], None]  # first column of a group, its values now [R, ≤ group]


def feed_back(
    weight: Tensor, factors: Sequence[Factor], begin: Begin, rounded: Round, group: int = GROUP
) -> None:
    """Round the columns of float32 [R, K] in order, each after the errors of those before it."""
    left = weight.t().clone(memory_format=torch.contiguous_format)
    for part in factors:
        for start in range(part.start, part.stop, GROUP):
            stop = min(start + GROUP, part.stop)
            upper = part.upper[start - part.start : stop - part.start, start - part.start :]
            errors = torch.empty((stop - start, len(weight)))
            for i in range(stop - start):
                if i % group == 0:
                    begin(start + i, left[start + i : min(start + i + group, stop)].t())
                errors[i] = (left[start + i] - rounded(start + i, left[start + i])) / upper[i, i]
                left[start + i + 1 : stop] -= upper[i, i + 1 : stop - start, None] * errors[i]
            left[stop : part.stop] -= upper[:, stop - start :].t() @ errors


def fit_with_feedback(
    weight: Tensor,
    table: Tensor,
    importance: Tensor | None,
    factors: Sequence[Factor],
    group: int = GROUP,
) -> tuple[Tensor, Tensor, Tensor]:
    """Fit as `group_scales.fit`, with feedback: codes uint8 [R, K], scale int8 [R, K/group], row_scale float32 [R]."""
    row_scale = fit(weight, table, importance, group)[2] * HEADROOM
    per_level = row_scale / LEVELS
    divisor = torch.where(per_level > 0, per_level, 1)
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    scale = torch.zeros((weight.shape[0], weight.shape[1] // group), dtype=torch.int8)
    step = torch.ones(len(weight))

    def begin(start: int, values: Tensor) -> None:
        nonlocal step
        part = None if importance is None else importance[start : start + group]
        _, sign, size = fit(values.contiguous(), table, part, group)
        level = (sign[:, 0] * (size / LEVELS) / divisor).round().clamp(-LEVELS, LEVELS)
        scale[:, start // group] = level.to(torch.int8)
        step = level * per_level

    def rounded(column: int, values: Tensor) -> Tensor:
        found = nearest_codes((values / torch.where(step != 0, step, 1))[:, None], table)
        codes[:, column] = found[:, 0].to(torch.uint8)
        return table_values(found, table)[:, 0] * step

    feed_back(weight, factors, begin, rounded, group)
    return codes, scale, row_scale


def round_with_feedback(weight: Tensor, scale: Tensor, factors: Sequence[Factor]) -> Tensor:
    """Round float32 [R, K] with feedback on the grid of each row's `scale` [R] → int8 codes [R, K]."""
    codes = torch.empty(weight.shape, dtype=torch.int8)

    def rounded(column: int, values: Tensor) -> Tensor:
        found = (values / scale).round().clamp(-LEVELS, LEVELS)
        codes[:, column] = found.to(torch.int8)
        return found * scale

    feed_back(weight, factors, lambda start, values: None, rounded)
    return codes
