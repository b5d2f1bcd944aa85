"""Contents of an exported file: names, sizes, versions, and nothing about the machine that wrote it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from backends.ort.layers import rewriter  # noqa: E402
from infer.errors import NotUsableError  # noqa: E402
from infer.graph import capture  # noqa: E402
from infer.graph.program import flatten  # noqa: E402
from infer.onnx import export as exporter  # noqa: E402
from infer.onnx import ort_session  # noqa: E402
from infer.spec import TensorSpec  # noqa: E402
from tests.support.onnx_models import Int8Linear, graph  # noqa: E402


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        y = self.layer(x) * mask[..., None]
        return {"hidden": y, "mean": y.mean(1), "flat": y.flatten(0, 1)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    text = "x=float32[batch,time,8];mask=float32[batch,time]"
    made = graph(TwoInputs(), text, torch.randn(2, 3, 8), mask=torch.ones(2, 3))
    path = tmp_path_factory.mktemp("export") / "model.onnx"
    exporter.export(made, path, rewriter("ort-u8u8"))
    return onnx.load(str(path), load_external_data=False)


def dims(value: onnx.ValueInfoProto) -> list[int | str]:
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


def test_inputs_and_outputs_keep_their_names_and_symbolic_sizes(model: onnx.ModelProto) -> None:
    found = {value.name: dims(value) for value in (*model.graph.input, *model.graph.output)}
    assert found["x"] == ["batch", "time", 8]
    assert found["mask"] == ["batch", "time"]
    assert found["hidden"] == ["batch", "time", 4]
    assert found["mean"] == ["batch", 4]
    assert found["flat"][1] == 4
    assert set(found) == {"x", "mask", "hidden", "mean", "flat"}


def test_no_symbol_of_torch_is_left_in_any_shape(model: onnx.ModelProto) -> None:
    names = {str(dim) for value in model.graph.value_info for dim in dims(value)}
    assert not any(name.startswith("s") and name[1:].isdigit() for name in names)


def test_opset_and_ir_version_are_those_that_runtimes_load(model: onnx.ModelProto) -> None:
    assert {entry.domain: entry.version for entry in model.opset_import}[""] == 20
    assert model.ir_version <= 10


def test_nothing_of_the_machine_is_written(model: onnx.ModelProto) -> None:
    text = str(model)
    assert "stack_trace" not in text
    assert str(Path(__file__).parent) not in text


def test_an_operator_without_onnx_form_is_named(tmp_path: Path) -> None:
    class Spectrum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.eigvals(x).real

    with pytest.raises(NotUsableError, match="linalg_eig"):
        exporter.export(
            graph(Spectrum(), "x=float32[3,3]", torch.randn(3, 3)), tmp_path / "m.onnx", rewriter("ort-u8u8")
        )


def test_an_opset_that_torch_cannot_export_is_refused(tmp_path: Path) -> None:
    made = graph(nn.Linear(4, 2), "input=float32[batch,4]", torch.randn(2, 4))
    with pytest.raises(NotUsableError, match="opset 25"):
        exporter.export(made, tmp_path / "m.onnx", rewriter("ort-u8u8"), opset=25)


def test_a_weight_used_twice_is_stored_once(tmp_path: Path) -> None:
    layer = Int8Linear(torch.randn(64, 64))
    made = graph(nn.Sequential(layer, layer), "input=float32[batch,64]", torch.randn(2, 64))
    exporter.export(made, tmp_path / "m.onnx", rewriter("ort-u8u8"))
    stored = onnx.load(str(tmp_path / "m.onnx")).graph.initializer
    assert [tuple(t.dims) for t in stored if t.data_type == onnx.TensorProto.UINT8].count((64, 64)) == 1


def returned(x: Tensor, y: Tensor) -> dict[str, Any]:
    """Return a model's outputs by case: `x` is its input, `y` is computed."""
    return {
        "an input": (x, y),
        "the only output": x,
        "an input twice": (y, x, x),
        "an input unchanged": (x.contiguous(), x.float(), y),
        "a number": (y, 3, "text", None, 2.5),
        "a size": (y, x.shape[0]),
        "named as the input": {"x": y, "linear": x},
        "named as a constant": {"layer.weight": y, "x_output": x, "x": x + 1},
        "a constant": (y.new_ones(3), y),
        "twice": (y, y),
        "views": (x[:], x.view(-1, 4, 2), y.mT, y[:, :1]),
    }


class Returns(nn.Module):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.layer, self.case = nn.Linear(8, 4), case

    def forward(self, x: Tensor) -> Any:
        return returned(x, self.layer(x))[self.case]


@pytest.mark.parametrize("case", returned(torch.ones(2, 8), torch.ones(2, 4)))
def test_outputs_that_are_inputs_constants_or_views_are_right(case: str, tmp_path: Path) -> None:
    module, x = Returns(case).eval(), torch.randn(5, 8)
    made = graph(module, "x=float32[batch,8]", torch.randn(2, 8))
    exporter.export(made, tmp_path / "m.onnx", rewriter("ort-u8u8"))
    runner = ort_session.OrtRunner(tmp_path / "m.onnx", made.inputs, made.outputs, "cpu")
    got = runner.run({"x": x})
    runner.close()
    assert list(got) == [spec.name for spec in made.outputs]
    for value, expected in zip(got.values(), flatten(module(x)), strict=True):
        torch.testing.assert_close(value, expected)


def test_an_output_that_has_the_name_of_an_input_gets_another_in_the_file() -> None:
    specs = {name: TensorSpec(name, "float32", (1,)) for name in ("x", "x_output", "y")}
    outputs = (specs["x"], specs["y"], specs["x_output"])
    assert exporter.output_names((specs["x"],), outputs) == ["x_output_output", "y", "x_output"]


def test_attention_with_a_learned_bias_is_exported_as_captured(tmp_path: Path) -> None:
    """With gradients torch would take another kernel for it, of whose output the captured view can't be taken."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.bias = nn.Linear(8, 8), nn.Parameter(torch.randn(1, 2, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            heads = self.layer(x).unflatten(-1, (2, 4)).transpose(1, 2)
            mask = heads @ heads.mT * self.bias
            found = nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
            return found.transpose(1, 2).contiguous().view(*x.shape[:2], -1)

    model, x = Attention(), torch.randn(3, 5, 8)
    path = tmp_path / "m.onnx"
    exporter.export(graph(model, "x=float32[batch,time,8]", x), path, rewriter("ort-u8u8"))
    found = ort_session.open_session(path, "cpu").run(None, {"x": x.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(found), model(x).detach(), rtol=1e-4, atol=1e-5)


SPEC = "input=float32[batch,3,8,8]"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_batch_norm_of_16_bits_is_folded_into_weights_of_16_bits(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model: Any = nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 1)
    )
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(0.5, 2)
    x, model = torch.randn(2, 3, 8, 8), model.eval()
    whole, expected = capture.in_dtype(copy.deepcopy(model), (TensorSpec.parse(SPEC),), dtype), model(x)
    path = tmp_path / "m.onnx"
    exporter.export(graph(whole, SPEC, x), path, rewriter("ort-u8u8"), opset=22)
    types = {tensor.data_type for tensor in onnx.load(str(path)).graph.initializer}
    assert onnx.TensorProto.FLOAT not in types
    if dtype == torch.float16:  # ONNX Runtime convolves no bfloat16 on CPUs
        found = ort_session.open_session(path, "cpu").run(None, {"input": x.numpy()})[0]
        torch.testing.assert_close(torch.from_numpy(found), expected.detach(), rtol=0.02, atol=0.02)
