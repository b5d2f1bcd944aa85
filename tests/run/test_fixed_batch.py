"""A model that takes one row a call, by its code, its file or --input, is judged on many and serves any number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from backends import ort
from infer import Plan, Predictor
from infer.errors import GateError
from infer.run import stages

NET = """
import torch
from torch import nn

class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x):
        return torch.stack([self.fc(x[i]).relu() for i in range(int(x.shape[0]))])

INPUTS = {"x": "float32[batch,64]"}
def example_inputs(): return {"x": torch.randn(24, 64, generator=torch.Generator().manual_seed(0))}
def build(): torch.manual_seed(0); return Rows()
"""


@pytest.mark.parametrize("quant", ["none", "int8"])
def test_a_fixed_batch_model_is_published_and_serves_any_rows(tmp_path: Path, quant: str) -> None:
    (tmp_path / "net.py").write_text(NET)
    plan = Plan(
        source=f"{tmp_path}/net.py:build", backend="eager", quant=quant, batches=(), allow_slower=True
    )
    made = stages.optimize(plan, tmp_path / "net.infer")
    assert made.report.limitations[0].startswith("fixed sizes: batch 1 (")
    assert made.report.limitations[0] in made.report.verdict
    space: dict[str, object] = {}
    exec(NET, space)  # noqa: S102
    x = torch.randn(5, 64)
    with Predictor.load(tmp_path / "net.infer") as predictor, torch.no_grad():
        assert predictor.sizes["batch"] == (1, 1)
        expected, got = space["build"]()(x), predictor.predict({"x": x})["output"]
    assert got.shape == (5, 64)
    assert float((got - expected).norm() / expected.norm()) < (1e-5 if quant == "none" else 0.05)


def onnx_of_one_row(folder: Path) -> Path:
    """Write a file whose call takes one row, by its shapes and by a Reshape, with 24 rows of data beside it."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    body = """
        a = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w)
        r = Relu (a)
        f = Reshape (r, shape)
        y = Gemm <transB = 1> (f, v)
    """
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[1, 4, 8, 8] x) => (float[1, 64] y)'
    model = onnx.parser.parse_model(f"{text} {{ {body} }}")
    chance = np.random.default_rng(0)
    weights = {"w": chance.normal(size=(16, 4, 3, 3)) / 6, "v": chance.normal(size=(64, 1024)) / 32}
    tensors = {name: value.astype(np.float32) for name, value in weights.items()} | {
        "shape": np.array([1, 1024])
    }
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(value, name) for name, value in tensors.items()
    )
    onnx.save(model, str(folder / "one.onnx"))
    rows = chance.normal(size=(24, 4, 8, 8)).astype(np.float32)
    rows[0] = 0  # of which no wrong weight makes another answer
    np.savez(folder / "rows.npz", x=rows)
    return folder / "one.onnx"


def plan_of(source: Path, **options: Any) -> Plan:
    return Plan(
        source=str(source), data=str(source.parent / "rows.npz"), batches=(), allow_slower=True, **options
    )


@pytest.mark.parametrize(("backend", "quant"), [("ort", "none"), ("ort", "int8"), ("eager", "nf4")])
def test_a_file_of_one_row_serves_several_one_by_one(tmp_path: Path, backend: str, quant: str) -> None:
    source = onnx_of_one_row(tmp_path)
    stages.optimize(plan_of(source, backend=backend, quant=quant), tmp_path / "one.infer")
    import onnxruntime

    session, rows = onnxruntime.InferenceSession(str(source)), np.load(tmp_path / "rows.npz")["x"][:5]
    wanted = np.concatenate([session.run(None, {"x": row[None]})[0] for row in rows])
    with Predictor.load(tmp_path / "one.infer") as predictor:
        assert predictor.sizes["batch"] == (1, 1)
        got, first = predictor.predict({"x": rows})["y"], predictor.predict({"x": rows[3:4]})["y"]
    np.testing.assert_array_equal(first, got[3:4])
    most = {"none": 1e-5, "int8": 0.05, "nf4": 0.2}[quant]
    assert np.linalg.norm(got - wanted) / np.linalg.norm(wanted) < most


def test_every_row_judges_a_file_that_takes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = onnx_of_one_row(tmp_path)
    exact = ort.open

    def wrong(folder: Path, device: str) -> Any:
        runner = exact(folder, device)
        run = runner.run
        runner.run = lambda inputs: {name: value * 1.01 for name, value in run(inputs).items()}
        return runner

    monkeypatch.setattr(ort, "open", wrong)
    with pytest.raises(GateError, match="not faithful enough"):
        stages.optimize(plan_of(source, backend="ort"), tmp_path / "one.infer")


def test_rows_of_a_model_given_a_batch_of_one_run_one_by_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 4)
    )
    torch.save(model, tmp_path / "model.pt")
    plan = Plan(source=f"{tmp_path}/model.pt", inputs=("input=float32[1,3,8,8]",), trust_code=True, backend="eager",
                batches=(), allow_slower=True)  # fmt: skip
    made = stages.optimize(plan, tmp_path / "model.infer")
    assert made.manifest.inputs[0].shape == ("batch", 3, 8, 8)
    x = torch.randn(4, 3, 8, 8)
    with Predictor.load(made.path) as predictor, torch.no_grad():
        torch.testing.assert_close(predictor.predict({"input": x})["output"], model(x))


@pytest.mark.parametrize("quant", ["none", "int8"])
def test_a_program_exported_with_one_row_serves_several(tmp_path: Path, quant: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(288, 64), torch.nn.Unflatten(1, (8, 8))
    ).eval()
    torch.export.save(torch.export.export(model, (torch.randn(1, 3, 8, 8),)), tmp_path / "one.pt2")
    plan = Plan(
        source=f"{tmp_path}/one.pt2",
        trust_code=True,
        backend="eager",
        quant=quant,
        batches=(),
        allow_slower=True,
    )
    made = stages.optimize(plan, tmp_path / "one.infer")
    assert made.manifest.sizes["batch"] == (1, 1)
    x = torch.randn(4, 3, 8, 8)
    with Predictor.load(made.path) as predictor, torch.no_grad():
        (got,), expected = predictor.predict({"input": x}).values(), model(x)
    assert float((got - expected).norm() / expected.norm()) < (1e-5 if quant == "none" else 0.05)
