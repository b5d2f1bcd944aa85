"""Random ONNX graphs: valid, the same at every call, and those that were once published with wrong answers."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("openvino")

import onnx

from tests.fuzz import onnx_graphs
from tests.support import random_onnx_graphs as graphs

# By what went wrong: a pad merged into a pool, two grids into one, integers in 32 bits, remainders, an erf after grids.
ONCE_WRONG = (28, 41, 16, 17, 23)


def test_random_graphs_are_valid() -> None:
    for seed in range(60):
        onnx.checker.check_model(graphs.make(seed), full_check=True)


def test_a_seed_makes_the_same_graph() -> None:
    assert graphs.make(3).SerializeToString() == graphs.make(3).SerializeToString()


@pytest.mark.openvino
@pytest.mark.parametrize("seed", ONCE_WRONG)
def test_graphs_once_wrong_are_right_or_refused(tmp_path: Path, seed: int) -> None:
    endings = onnx_graphs.try_seed(seed, tmp_path)
    assert [ending["backend"] for ending in endings] == list(onnx_graphs.BACKENDS)
    assert {ending["result"] for ending in endings} <= {"published", "refused"}, endings
