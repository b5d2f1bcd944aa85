"""Coordinate descent after error feedback: the error falls, and ends where no single change lowers it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from infer.compress.calibration.coordinate_descent import refine
from infer.compress.calibration.gptq import DAMPING, factor, fit_with_feedback
from infer.compress.calibration.group_scales import table_values
from infer.compress.calibration.layer_statistics import LayerStats
from infer.compress.formats import nf4
from infer.compress.table_format import fit_calibrated
from infer.kernels.ops.bitpack import LEVELS

ROWS, COLUMNS = 33, 128
FITTED = tuple[Tensor, Tensor, Tensor]


def problem(num_tables: int) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(3)
    x = torch.randn(512, 24, generator=make) @ torch.randn(24, COLUMNS, generator=make)
    hessian = x.t() @ x / len(x)
    weight = torch.randn(ROWS, COLUMNS, generator=make)
    tables = torch.tensor([nf4.TABLE])[:, ::2] if num_tables > 1 else torch.tensor([nf4.TABLE])
    return weight, tables.repeat(num_tables, 1), hessian


def damped(hessian: Tensor) -> Tensor:
    return hessian + DAMPING * hessian.diagonal().mean() * torch.eye(len(hessian))


def error(weight: Tensor, table: Tensor, found: FITTED, hessian: Tensor) -> Tensor:
    codes, scale, row_scale = found
    group = weight.shape[1] // scale.shape[1]
    steps = (scale.float() * (row_scale / LEVELS)[:, None]).repeat_interleave(group, 1)
    missed = (weight - table_values(codes.long(), table) * steps).double()
    return ((missed @ hessian.double()) * missed).sum(1)


@pytest.mark.parametrize(("num_tables", "group"), [(1, 64), (1, 16), (2, 64)])
def test_descent_lowers_the_error_of_every_row(num_tables: int, group: int) -> None:
    weight, table, hessian = problem(num_tables)
    factors = [factor(0, hessian.clone())]
    found = fit_with_feedback(weight, table, None, factors, group)
    given = [part.clone() for part in found]
    codes, scale = refine(weight, table, factors, *found)
    before, after = (
        error(weight, table, each, damped(hessian)) for each in (found, (codes, scale, found[2]))
    )
    assert bool((after <= before * (1 + 1e-5)).all())
    assert float(after.sum()) < 0.95 * float(before.sum())
    assert all(torch.equal(*pair) for pair in zip(given, found, strict=True)), "the input is not changed"


def test_descent_ends_where_no_code_and_no_scale_lowers_the_error() -> None:
    weight, table, hessian = problem(1)
    factors = [factor(0, hessian.clone())]
    first = fit_with_feedback(weight, table, None, factors)
    codes, scale = refine(weight, table, factors, *first, sweeps=12)
    least = error(weight, table, (codes, scale, first[2]), damped(hessian))
    for move in (-1, 1):
        for column in range(0, COLUMNS, 31):
            other = codes.clone()
            other[:, column] = (codes[:, column].int() + move).clamp(0, 15).to(torch.uint8)
            changed = error(weight, table, (other, scale, first[2]), damped(hessian))
            assert bool((changed >= least * (1 - 1e-4)).all())
        for part in range(scale.shape[1]):
            level = scale.clone()
            level[:, part] = (scale[:, part].int() + move).clamp(-LEVELS, LEVELS).to(torch.int8)
            changed = error(weight, table, (codes, level, first[2]), damped(hessian))
            assert bool((changed >= least * (1 - 1e-4)).all())


def test_descent_keeps_to_the_diagonal_blocks_of_a_hessian() -> None:
    weight, table, hessian = problem(1)
    factors = [factor(0, hessian[:64, :64].clone()), factor(64, hessian[64:, 64:].clone())]
    found = fit_with_feedback(weight, table, None, factors)
    codes, scale = refine(weight, table, factors, *found)
    for part, half in enumerate((slice(0, 64), slice(64, 128))):
        pieces = found[0][:, half], found[1][:, part : part + 1], found[2]
        own = [factor(0, hessian[half, half].clone())]
        alone = refine(weight[:, half], table, own, *pieces)
        assert torch.equal(codes[:, half], alone[0])
        assert torch.equal(scale[:, part : part + 1], alone[1])


def test_descent_takes_empty_groups_and_columns_without_input() -> None:
    weight, table, hessian = problem(1)
    weight[:, :64] = 0
    hessian[70:90] = hessian[:, 70:90] = 0
    factors = [factor(0, hessian.clone())]
    found = fit_with_feedback(weight, table, None, factors)
    codes, scale = refine(weight, table, factors, *found)
    assert bool(error(weight, table, (codes, scale, found[2]), damped(hessian)).isfinite().all())


@pytest.mark.parametrize(("count", "descends"), [(COLUMNS, False), (2 * COLUMNS, True)])
def test_coordinate_descent_needs_two_rows_per_column(count: int, descends: bool) -> None:
    """Of fewer calibration rows the noise would be fitted: the result is that of error feedback."""
    make = torch.Generator().manual_seed(4)
    weight, table = torch.randn(ROWS, COLUMNS, generator=make), torch.tensor([nf4.TABLE])
    x = torch.randn(count, 24, generator=make) @ torch.randn(24, COLUMNS, generator=make)
    stats = LayerStats.empty(COLUMNS)
    stats.add(x)
    stats.add_products(x, COLUMNS)
    found = fit_calibrated(weight, table, stats)
    plain = fit_with_feedback(weight, table, stats.importance(COLUMNS), stats.factors(COLUMNS))
    assert torch.equal(found[0], plain[0]) is not descends
