"""float16 and bfloat16 inside the graph: float32 at its ends, sums in float32, numbers close to the original."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

import onnx_ir as ir  # noqa: E402

from backends.trt import layers, precision_casts  # noqa: E402
from infer.errors import NotUsableError  # noqa: E402
from infer.onnx import export as exporter  # noqa: E402
from tests.support.onnx_models import graph  # noqa: E402


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.LayerNorm(16)
        self.layer, self.table = nn.Linear(16, 16), nn.Embedding(10, 16)

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        pooled = torch.relu(self.conv(x)).mean((2, 3))
        y = self.layer(self.norm(pooled)) + self.table(ids)
        hidden = y.masked_fill(ids[:, None] == 3, -3.0e38)
        return torch.softmax(hidden, -1), y.argmax(-1)


@pytest.fixture(scope="module")
def original() -> tuple[Any, dict[str, Tensor], list[Tensor]]:
    torch.manual_seed(0)
    samples = {"x": torch.randn(3, 3, 8, 8), "ids": torch.tensor([1, 2, 4])}
    made = graph(Block(), "x=float32[batch,3,8,8];ids=int64[batch]", samples["x"], ids=samples["ids"])
    return made, samples, made.callable()(**samples)


def lowered(made: Any, dtype: Any, path: Path) -> onnx.ModelProto:
    model = exporter.to_ir(made, layers.PARSER, opset=22)
    assert precision_casts.lower_precision(model, dtype) > 0
    exporter.save(model, path)
    onnx.checker.check_model(str(path), full_check=True)
    return onnx.load(str(path))


def test_float16_graphs_stay_close_to_float32(original: Any, tmp_path: Path) -> None:
    made, samples, want = original
    lowered(made, "float16", tmp_path / "m.onnx")
    opened = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    got = opened.run(None, {name: value.numpy() for name, value in samples.items()})
    assert np.abs(got[0] - want[0].detach().numpy()).max() < 2e-3
    assert (got[1] == want[1].numpy()).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float16_graphs_have_float32_inputs_and_outputs(original: Any, tmp_path: Path, dtype: str) -> None:
    model = lowered(original[0], dtype, tmp_path / "m.onnx")
    ends = [*model.graph.input, *model.graph.output]
    kinds = {value.name: value.type.tensor_type.elem_type for value in ends}
    assert kinds["x"] == kinds["output_0"] == onnx.TensorProto.FLOAT
    assert kinds["ids"] == kinds["output_1"] == onnx.TensorProto.INT64
    number = onnx.TensorProto.FLOAT16 if dtype == "float16" else onnx.TensorProto.BFLOAT16
    stored = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    assert {kind for name, kind in stored.items() if "conv" in name or "table" in name} == {number}


def test_normalization_and_softmax_stay_float32(original: Any, tmp_path: Path) -> None:
    model = lowered(original[0], "float16", tmp_path / "m.onnx")
    inferred = onnx.shape_inference.infer_shapes(model)
    kinds = {value.name: value.type.tensor_type.elem_type for value in inferred.graph.value_info}
    for node in model.graph.node:
        if node.op_type in ("LayerNormalization", "Softmax", "ReduceMean"):
            assert kinds[node.input[0]] == onnx.TensorProto.FLOAT, node.op_type
        if node.op_type in ("Conv", "Gemm", "MatMul"):
            assert kinds[node.output[0]] == onnx.TensorProto.FLOAT16, node.op_type


def test_values_beyond_float16_are_clipped_not_infinite(original: Any, tmp_path: Path) -> None:
    model = lowered(original[0], "float16", tmp_path / "m.onnx")
    for tensor in model.graph.initializer:
        assert np.isfinite(onnx.numpy_helper.to_array(tensor).astype(np.float64)).all(), tensor.name


def test_a_graph_with_subgraphs_is_refused() -> None:
    text = """<ir_version: 10, opset_import: ["" : 20]>
    agraph (bool c, float[2] x) => (float[2] y) {
        y = If (c) <then_branch = g1 () => (float[2] a) { a = Identity(x) },
                    else_branch = g2 () => (float[2] b) { b = Neg(x) }>
    }"""
    with pytest.raises(NotUsableError, match="the body of If"):
        precision_casts.lower_precision(ir.from_onnx_text(text), "float16")
