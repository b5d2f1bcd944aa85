"""Separation of calibration and held-out rows, and the retrieval metric of embeddings."""

from __future__ import annotations

import pytest
import torch

from infer import fidelity
from infer.load.samples import sample_split
from infer.spec import TensorSpec

SPECS = (TensorSpec("x", "float32", ("batch", 2)), TensorSpec("ids", "int64", ("batch", "seq")))


def rows(values: list[int]) -> dict[str, torch.Tensor]:
    x = torch.tensor(values, dtype=torch.float32)[:, None].repeat(1, 2)
    return {"x": x, "ids": torch.tensor(values)[:, None].repeat(1, 3)}


def test_calibration_and_evaluation_rows_alternate_and_are_disjoint() -> None:
    held, calibration = sample_split.split(rows(list(range(7))), SPECS)
    assert held["ids"][:, 0].tolist() == [0, 2, 4, 6]
    assert calibration["ids"][:, 0].tolist() == [1, 3, 5]
    assert calibration["x"][:, 0].tolist() == [1.0, 3.0, 5.0]


def test_a_duplicated_row_is_used_for_evaluation_only() -> None:
    held, calibration = sample_split.split(rows([5, 5, 6, 7, 8, 6]), SPECS)
    assert held["ids"][:, 0].tolist() == [5, 6, 8]
    assert calibration["ids"][:, 0].tolist() == [7]


def test_rows_equal_in_one_input_only_are_different() -> None:
    samples = rows([1, 1])
    samples["ids"][1, 2] = 9
    assert len(sample_split.split(samples, SPECS)[1]["x"]) == 1


@pytest.mark.parametrize("values", [[3], [3, 3, 3, 3]])
def test_no_rows_are_left_for_calibration_of_duplicates(values: list[int]) -> None:
    assert sample_split.split(rows(values), SPECS)[1] == {}


def test_a_fixed_batch_is_not_split() -> None:
    specs = (TensorSpec("x", "float32", (4, 2)),)
    held, calibration = sample_split.split({"x": torch.arange(8.0).reshape(4, 2)}, specs)
    assert len(held["x"]) == 4
    assert calibration == {}


def metrics(reference: torch.Tensor, got: torch.Tensor, size: int = 3) -> dict[str, object]:
    comparison = fidelity.Comparison("embedding")
    for start in range(0, len(reference), size):
        comparison.add(
            {"embedding": reference[start : start + size]}, {"embedding": got[start : start + size]}
        )
    return {m.name: m.value for m in comparison.metrics()}


def test_retrieval_metrics_ignore_scale_and_rotation() -> None:
    x = torch.randn(20, 8)
    turn = torch.linalg.qr(torch.randn(8, 8)).Q
    found = metrics(x, 3 * x @ turn)
    assert (found["nearest"], found["recall"]) == (1.0, 1.0)
    assert found["rank_correlation"] == pytest.approx(1.0, abs=1e-3)


def test_retrieval_agrees_with_ranking_by_hand() -> None:
    x, y = torch.randn(15, 4), torch.randn(15, 4)
    found = metrics(x, y)
    unit = [torch.nn.functional.normalize(t, dim=-1) for t in (x, y)]
    orders = [
        [
            sorted((j for j in range(15) if j != i), key=lambda j, u=u, i=i: -float(u[i] @ u[j]))
            for i in range(15)
        ]
        for u in unit
    ]
    pairs = list(zip(*orders, strict=True))
    assert found["nearest"] == pytest.approx(sum(a[0] == b[0] for a, b in pairs) / 15)
    assert found["recall"] == pytest.approx(sum(len({*a[:10]} & {*b[:10]}) for a, b in pairs) / 150)
    squares = [sum((a.index(j) - b.index(j)) ** 2 for j in a) for a, b in pairs]
    assert found["rank_correlation"] == pytest.approx(
        sum(1 - 6 * s / (14 * (14**2 - 1)) for s in squares) / 15
    )


def test_rank_correlation_of_reversed_ranks_is_minus_one() -> None:
    x = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.1, 0.9]])
    assert "recall" in metrics(x, x)
    assert "recall" not in metrics(x[:2], x[:2])
    assert "recall" not in metrics(x, torch.full_like(x, torch.nan))
