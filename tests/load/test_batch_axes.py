"""The batch of an ONNX file is where rows are: at any axis, found by growing it, and not what axis 0 happens to be."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from infer import Plan, Predictor, load, optimize
from infer.errors import InputError
from infer.load.loaded_model import LoadedModel
from infer.run.float_reference import takes

F, INT = TensorProto.FLOAT, TensorProto.INT64
WEIGHT = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
Dims = list[int | str | None]


def save(
    place: Path, nodes: list[Any], inputs: dict[str, tuple[int, Dims]], outputs: dict[str, Dims]
) -> Path:
    given = [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()]
    made = [helper.make_tensor_value_info(name, F, shape) for name, shape in outputs.items()]
    stored = [numpy_helper.from_array(WEIGHT, "w"), numpy_helper.from_array(np.array([0], np.int64), "zero")]
    model = helper.make_model(
        helper.make_graph(nodes, "g", given, made, stored),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    onnx.save(model, place / "m.onnx")
    return place / "m.onnx"


def stateful(place: Path) -> Path:
    """Save y = x @ w + state, newState = y, whose state is [1, batch, 4] and has no names; `sr` scales."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Squeeze", ["state", "zero"], ["s"]),
        helper.make_node("Cast", ["sr"], ["f"], to=F),
        helper.make_node("Mul", ["m", "f"], ["n"]),
        helper.make_node("Add", ["n", "s"], ["sum"]),
        helper.make_node("Tanh", ["sum"], ["y"]),
        helper.make_node("Unsqueeze", ["y", "zero"], ["stateN"]),
    ]
    inputs: dict[str, tuple[int, Dims]] = {"x": (F, [None, 4]), "state": (F, [1, None, 4]), "sr": (INT, [])}
    return save(place, nodes, inputs, {"y": [None, 4], "stateN": [None, None, None]})


def opened(path: Path, **more: Any) -> LoadedModel:
    return load.load(Plan(source=str(path), **more), tried=takes)


def shapes(loaded: LoadedModel) -> dict[str, tuple[int | str, ...]]:
    return {spec.name: spec.shape for spec in (*loaded.inputs, *loaded.meta["outputs"])}


def test_an_axis_without_a_name_is_found_by_growing_it(tmp_path: Path) -> None:
    found = opened(stateful(tmp_path))
    assert shapes(found) == {
        **{"x": ("batch", 4), "state": (1, "batch", 4), "sr": ()},
        **{"y": ("batch", 4), "stateN": (1, "batch", 4)},
    }
    assert {name: tuple(value.shape) for name, value in found.samples.items()} == {
        **{"x": (64, 4), "state": (1, 64, 4), "sr": ()}
    }
    assert not found.samples["state"].any()


def test_data_of_a_stateful_file_has_its_rows_along_each_axis(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    np.savez(
        tmp_path / "d.npz",
        x=draw.standard_normal((12, 4)).astype(np.float32),
        state=draw.standard_normal((1, 12, 4)).astype(np.float32),
        sr=np.array(2),
    )
    found = opened(stateful(tmp_path), data=str(tmp_path / "d.npz"))
    assert shapes(found)["state"] == (1, "batch", 4)
    assert found.samples["state"].shape == (1, 12, 4)


def test_a_state_that_the_data_leaves_out_is_zeros(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.ones((6, 4), np.float32), sr=np.array(2))
    found = opened(stateful(tmp_path), data=str(tmp_path / "d.npz"))
    assert found.samples["state"].shape == (1, 6, 4)
    assert not found.samples["state"].any()


def test_a_stateful_file_is_published_and_carried_in_a_session(tmp_path: Path) -> None:
    made = optimize(
        Plan(source=str(stateful(tmp_path)), backend="ort", batches=(), allow_slower=True),
        tmp_path / "m.infer",
    )
    assert made.manifest.states == {"state": "stateN"}
    assert made.manifest.joins == "padded"
    x, state = np.random.default_rng(1).standard_normal((9, 1, 4)).astype(np.float32), np.zeros((1, 4))
    with Predictor.load(tmp_path / "m.infer") as made_by, made_by.session({"sr": np.array(3)}) as session:
        for piece in x:
            state = np.tanh(piece @ WEIGHT * 3 + state)
            np.testing.assert_allclose(session.predict(piece)["y"], state, atol=1e-5)


def test_a_time_axis_in_front_is_no_batch(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("CumSum", ["m", "zero_"], ["y"]),
    ]
    nodes.insert(0, helper.make_node("Squeeze", ["zero", "zero"], ["zero_"]))
    for named in ("steps", None):
        found = opened(save(tmp_path, nodes, {"x": (F, [named, 4])}, {"y": [named, 4]}))
        assert "batch" not in shapes(found)["x"]


def test_the_start_of_a_process_makes_no_model_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a slow model few rows are tried, and a time axis in front would pass for the batch."""
    times = itertools.chain([0.0], itertools.repeat(2.0))
    clock = SimpleNamespace(monotonic=lambda: next(times))
    monkeypatch.setattr("infer.load.samples.batch_axes.time", clock)
    test_a_time_axis_in_front_is_no_batch(tmp_path)


@pytest.mark.parametrize("name", ["batch_size", "N", None, "unk__7"])
def test_rows_in_front_are_the_batch_whatever_their_name(tmp_path: Path, name: str | None) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    found = opened(save(tmp_path, nodes, {"x": (F, [name, 4])}, {"y": [name, 4]}))
    assert shapes(found) == {"x": ("batch", 4), "y": ("batch", 4)}


def test_inputs_whose_rows_have_different_names_share_the_batch(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["a", "w"], ["m"]), helper.make_node("Add", ["m", "b"], ["y"])]
    inputs: dict[str, tuple[int, Dims]] = {"a": (F, ["a_rows", 4]), "b": (F, ["b_rows", 4])}
    found = opened(save(tmp_path, nodes, inputs, {"y": ["y_rows", 4]}))
    assert shapes(found) == {"a": ("batch", 4), "b": ("batch", 4), "y": ("batch", 4)}


def test_a_table_that_all_rows_share_is_no_batch(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "table"], ["y"])]
    inputs: dict[str, tuple[int, Dims]] = {"x": (F, ["batch", 4]), "table": (F, [4, 6])}
    np.savez(tmp_path / "d.npz", x=np.ones((10, 4), np.float32), table=np.ones((4, 6), np.float32))
    path = save(tmp_path, nodes, inputs, {"y": ["batch", 6]})
    plan = Plan(
        source=str(path), backend="ort", batches=(), allow_slower=True, data=f"{tmp_path}/d.npz", max_batch=4
    )
    optimize(plan, tmp_path / "m.infer")
    draw = np.random.default_rng(0)
    x, tables = draw.standard_normal((9, 4), np.float32), draw.standard_normal((2, 4, 6), np.float32)
    with Predictor.load(tmp_path / "m.infer") as made:
        assert made.joins == "padded"
        for one, table in zip(made.predict([{"x": x, "table": t} for t in tables]), tables, strict=True):
            np.testing.assert_allclose(one["y"], x @ table, atol=1e-5)


def test_a_file_that_takes_one_row_alone_is_run_row_by_row(tmp_path: Path) -> None:
    nodes = [helper.make_node("Concat", ["x", "fixed"], ["both"], axis=1)]
    nodes.append(helper.make_node("MatMul", ["both", "w"], ["y"]))
    inputs: dict[str, tuple[int, Dims]] = {"x": (F, ["batch", 2]), "fixed": (F, [1, 2])}
    found = opened(save(tmp_path, nodes, inputs, {"y": [None, 4]}))
    assert found.sizes["batch"] == (1, 1)


def test_files_are_joined_along_each_axis_and_share_their_scalars(tmp_path: Path) -> None:
    source = stateful(tmp_path)
    (tmp_path / "data").mkdir()

    def write(index: int, rate: int) -> None:
        x, state = np.full((3, 4), index, np.float32), np.zeros((1, 3, 4), np.float32)
        np.savez(tmp_path / f"data/{index}.npz", x=x, state=state, sr=np.array(rate))

    write(0, 2), write(1, 2)
    found = opened(source, data=str(tmp_path / "data"))
    assert {name: tuple(value.shape) for name, value in found.samples.items()} == {
        **{"x": (6, 4), "state": (1, 6, 4), "sr": ()}
    }
    write(1, 3)
    with pytest.raises(InputError, match="'sr' has no rows, and differs between them"):
        opened(source, data=str(tmp_path / "data"))
