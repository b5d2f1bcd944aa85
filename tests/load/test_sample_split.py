"""Rows that judge and rows that calibrate: none is both, and kinds of rows are among either."""

from __future__ import annotations

import pytest
import torch

from infer.load.samples import sample_split
from infer.spec import TensorSpec

SPECS = (TensorSpec("x", "float32", ("batch", 1)),)


def split(values: torch.Tensor, together: int = 1) -> tuple[list[float], list[float]]:
    """Return the values that judge and those that calibrate."""
    sides = sample_split.split({"x": values.float()[:, None]}, SPECS, together=together)
    return tuple(side["x"][:, 0].tolist() if side else [] for side in sides)  # type: ignore[return-value]


@pytest.mark.parametrize("period", [2, 3, 4, 5, 6, 8, 10, 12])
def test_kinds_that_come_in_turn_judge_and_calibrate(period: int) -> None:
    judging, calibrating = split(torch.arange(64))
    kinds = set(range(period))
    assert {int(value) % period for value in judging} == kinds
    assert {int(value) % period for value in calibrating} == kinds
    assert sorted(judging + calibrating) == list(range(64))


def test_sorted_data_is_spread_over_both() -> None:
    for side in split(torch.arange(64)):
        assert 24 <= len(side) <= 40
        assert min(side) < 4
        assert max(side) > 59
        assert max(b - a for a, b in zip(side, side[1:], strict=False)) <= 3


def test_equal_rows_are_on_one_side() -> None:
    judging, calibrating = split(torch.arange(16) % 2)
    assert {*judging}.isdisjoint(calibrating)
    assert len(judging) == len(calibrating) == 8


def test_rows_of_one_question_stay_together() -> None:
    for side in split(torch.arange(80), together=4):
        assert side
        assert all(side[i : i + 4] == [side[i] + k for k in range(4)] for i in range(0, len(side), 4))


def test_a_lone_row_judges() -> None:
    assert split(torch.ones(1)) == ([1.0], [])
