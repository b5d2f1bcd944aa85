"""Arrays of numpy reach a backend that computes with them without becoming tensors, checked like any input."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from infer import Plan, Predictor, optimize
from infer.errors import InputError, ResourceError, UsageError
from infer.predict import input_fast_path
from infer.predict.input_fast_path import FastInputs
from infer.spec import TensorSpec
from tests.predict.test_predictor import RECIPE


@pytest.fixture(scope="module", params=["ort", pytest.param("openvino", marks=pytest.mark.openvino)])
def artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arrays")
    (folder / "recipe.py").write_text(RECIPE)
    space: dict[str, Any] = {}
    exec(RECIPE, space)  # noqa: S102
    torch.save(space["build"]().state_dict(), folder / "model.pt")
    source, model = str(folder / "model.pt"), f"{folder}/recipe.py:build"
    plan = Plan(source=source, model=model, backend=request.param, max_batch=32, batches=())
    return optimize(plan, folder / "model.infer").path


@pytest.fixture
def predictor(artifact: Path) -> Iterator[Predictor]:
    with Predictor.load(artifact) as opened:
        yield opened


def rows(count: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(count)
    return {
        "x": draw.standard_normal((count, 64), np.float32),
        "bias": draw.standard_normal(count, np.float32),
    }


@pytest.mark.parametrize("count", [1, 3, 32, 33])
def test_arrays_and_tensors_give_the_same_outputs(predictor: Predictor, count: int) -> None:
    arrays = rows(count)
    got = predictor.predict(arrays)
    want = predictor.predict({name: torch.from_numpy(value) for name, value in arrays.items()})
    assert list(got) == list(want) == ["y"]
    assert isinstance(got["y"], np.ndarray)
    assert isinstance(want["y"], torch.Tensor)
    assert np.array_equal(got["y"], want["y"].numpy())
    assert (got["y"].dtype, got["y"].shape) == (np.float32, (count, 8))


def test_arrays_in_another_order_of_memory_are_read_right(predictor: Predictor) -> None:
    arrays = rows(4)
    want = predictor.predict(arrays)["y"]
    turned = {"bias": np.repeat(arrays["bias"], 2)[::2], "x": np.asfortranarray(arrays["x"])}
    assert not turned["x"].flags.c_contiguous
    assert np.array_equal(predictor.predict(turned)["y"], want)
    big_endian = {**arrays, "x": arrays["x"].astype(">f4")}
    with pytest.raises(InputError, match="expected"):
        predictor.predict(big_endian)


def test_outputs_are_not_changed_by_the_next_call(predictor: Predictor) -> None:
    first = predictor.predict(rows(2))["y"]
    kept = first.copy()
    predictor.predict(rows(2) | {"x": np.ones((2, 64), np.float32)})
    assert np.array_equal(first, kept)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": np.zeros((2, 63), np.float32)}, "63"),
        ({"x": np.zeros((2, 64), np.float64)}, "float64"),
        ({"x": np.zeros((3, 64), np.float32)}, "batch"),
        ({"y": np.zeros(2, np.float32)}, "'y'"),
    ],
)
def test_arrays_that_do_not_fit_are_named(predictor: Predictor, change: dict[str, Any], said: str) -> None:
    predictor.predict(rows(2))  # a shape that fits is remembered
    with pytest.raises(InputError, match=said):
        predictor.predict(rows(2) | change)


def test_a_closed_predictor_refuses_arrays(artifact: Path) -> None:
    predictor = Predictor.load(artifact)
    predictor.predict(rows(1))
    predictor.close()
    with pytest.raises(UsageError, match="closed"):
        predictor.predict(rows(1))


def test_memory_that_runs_out_is_a_resource_error(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def run(self, *given: Any, **named: Any) -> None:
            raise RuntimeError("Failed to allocate memory for requested buffer of size 1")

        infer = run

    runner = predictor._runner
    monkeypatch.setattr(runner, "_session", Full(), raising=False)
    if hasattr(runner, "_local"):
        runner._local.request = Full()
    for inputs in (rows(1), {name: torch.from_numpy(value) for name, value in rows(1).items()}):
        with pytest.raises(ResourceError, match="out of memory"):
            predictor.predict(inputs)


def test_tensors_of_any_kind_give_the_outputs_of_their_values(predictor: Predictor) -> None:
    arrays = rows(4)
    want = predictor.predict(arrays)["y"]
    x, bias = (torch.from_numpy(value) for value in arrays.values())
    kinds = (x.clone().requires_grad_(), torch.nn.Parameter(x), x.t().contiguous().t(), arrays["x"])
    for kind in kinds:
        got = predictor.predict({"x": kind, "bias": bias})["y"]
        assert isinstance(got, torch.Tensor)
        assert np.array_equal(got.numpy(), want)
    fast = FastInputs(predictor.inputs, predictor.sizes)
    assert fast.arrays({"x": x.double(), "bias": bias}) is None
    assert fast.arrays({"x": x.to("meta"), "bias": bias}) is None


def test_only_so_many_shapes_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_fast_path, "MOST_SHAPES", 3)
    fast = FastInputs((TensorSpec("x", "float32", ("batch", 2)),), {"batch": (1, 64)})
    for count in (*range(1, 10), *range(1, 10)):
        assert fast.arrays({"x": np.zeros((count, 2), np.float32)}) is not None
    assert len(fast._known) == 3
    for wrong in (np.zeros((65, 2), np.float32), np.zeros((0, 2), np.float32), np.zeros(2, np.float32)):
        assert fast.arrays({"x": wrong}) is None
        assert fast.tensors({"x": torch.from_numpy(wrong)}) is None
    assert fast.arrays({"x": [[0.0, 0.0]]}) is None
    assert fast.arrays({}) is None


def test_bfloat16_inputs_are_no_arrays() -> None:
    fast = FastInputs((TensorSpec("x", "bfloat16", (2,)),), {})
    assert fast.arrays({"x": np.zeros(2, np.float32)}) is None
    assert fast.tensors({"x": torch.zeros(2, dtype=torch.bfloat16)}) is not None
