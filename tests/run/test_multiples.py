"""Sizes that must be multiples of a number are found, captured as such, and kept as a limit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from infer import Plan, Predictor, optimize
from infer.errors import InputError
from infer.load.samples import batch_axes

NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        rows, length = x.shape
        return self.fc(x.reshape(rows, length // 4, 4))

def build(): return Net().eval()
"""


@pytest.mark.parametrize("backend", ["eager", "ort"])
def test_a_length_that_four_must_divide_stays_a_length(tmp_path: Path, backend: str) -> None:
    (tmp_path / "net.py").write_text(NETS)
    x = np.random.default_rng(0).standard_normal((6, 32), np.float32)
    np.savez(tmp_path / "d.npz", x=x)
    plan = {"backend": backend, "inputs": ("x=float32[batch,time]",), "data": f"{tmp_path}/d.npz"}
    made = optimize(
        Plan(source=f"{tmp_path}/net.py:build", batches=(), allow_slower=True, **plan),  # type: ignore[arg-type]
        tmp_path / "net.infer",
    )
    assert made.manifest.multiples == {"time": 4}
    assert "sizes: time in multiples of 4 (the model's code takes no others)" in made.manifest.verdict
    space: dict[str, object] = {}
    exec(NETS, space)  # noqa: S102
    module = space["build"]()  # type: ignore[operator]
    with Predictor.load(tmp_path / "net.infer") as predictor:
        assert predictor.info.multiples == {"time": 4}
        for length in (8, 12, 100):
            given = np.random.default_rng(length).standard_normal((3, length), np.float32)
            with torch.no_grad():
                want = module(torch.from_numpy(given)).numpy()
            np.testing.assert_allclose(predictor.predict(given), want, atol=1e-5)
        with pytest.raises(InputError, match="expected time to be a multiple of 4, got 30"):
            predictor.predict(np.zeros((1, 30), np.float32))


def _by_fours(place: Path) -> Path:
    """Save a file that takes the mean of four rows each."""
    shape = numpy_helper.from_array(np.array([-1, 4, 6], np.int64), "shape")
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["four"]),
        helper.make_node("ReduceMean", ["four"], ["y"], axes=[1], keepdims=0),
    ]
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 6])
    made = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["means", 6])
    graph = helper.make_graph(nodes, "g", [given], [made], [shape])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), place)
    return place


def test_rows_that_a_file_takes_in_fours_are_given_in_fours(tmp_path: Path) -> None:
    source = _by_fours(tmp_path / "m.onnx")
    made = optimize(
        Plan(source=str(source), backend="ort", batches=(1, 8), allow_slower=True), tmp_path / "m.infer"
    )
    assert (made.manifest.multiples, made.manifest.sizes["batch"][0]) == ({"batch": 4}, 4)
    assert made.manifest.joins == "none"
    x = np.random.default_rng(0).standard_normal((12, 6), np.float32)
    with Predictor.load(tmp_path / "m.infer") as predictor:
        np.testing.assert_allclose(predictor.predict(x), x.reshape(3, 4, 6).mean(1), atol=1e-6)
        with pytest.raises(InputError, match="expected batch to be a multiple of 4, got 6"):
            predictor.predict(x[:6])


def test_a_slow_file_that_ran_three_rows_takes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_axes, "SLOW", 0.0)
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 6])
    made = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["m", 6])
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [given], [made])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "m.onnx")
    plan = Plan(source=str(tmp_path / "m.onnx"), backend="ort", batches=(), allow_slower=True)
    found = optimize(plan, tmp_path / "m.infer").manifest
    assert found.sizes["batch"][0] == 1
    with Predictor.load(tmp_path / "m.infer") as predictor:
        assert predictor.predict(np.ones((1, 6), np.float32)).shape == (1, 6)


SQUARES = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 128)

    def forward(self, x):
        n = x.shape[1]
        y = self.layer(x[:, 3:] - x[:, :-3])
        return y if (n * n) % 4 == n % 2 else y * 2  # always true, which the exporter can't prove

def build(): return Net().eval()
"""


def test_a_narrowed_length_with_a_guard_that_cannot_be_proven_is_quantized(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(SQUARES)
    x = np.random.default_rng(0).standard_normal((32, 6, 64), np.float32)
    np.savez(tmp_path / "d.npz", x=x)
    plan = Plan(
        source=f"{tmp_path}/net.py:build", trust_code=True, backend="eager", inputs=("x=float32[batch,time,64]",),
        data=f"{tmp_path}/d.npz", quant="int8", batches=(), allow_slower=True,
    )  # fmt: skip
    made = optimize(plan, tmp_path / "net.infer").manifest
    assert any(line.startswith("narrower sizes: time 5 to ") for line in made.verdict)
    with Predictor.load(tmp_path / "net.infer", trust_code=True) as predictor:
        for length in (5, 8, 31):
            given = np.random.default_rng(length).standard_normal((2, length, 64), np.float32)
            assert predictor.predict(given).shape == (2, length - 3, 128)
