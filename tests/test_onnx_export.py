"""What stands in an exported file: names, sizes, versions, nothing of the machine that wrote it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from infer.errors import NotUsableError  # noqa: E402
from infer.onnx import export as exporter  # noqa: E402
from tests.onnx_models import Int8Linear, graph  # noqa: E402


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
    exporter.export(made, "ort-u8u8", path)
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
            graph(Spectrum(), "x=float32[3,3]", torch.randn(3, 3)), "ort-u8u8", tmp_path / "m.onnx"
        )


def test_an_opset_that_torch_cannot_export_is_refused(tmp_path: Path) -> None:
    made = graph(nn.Linear(4, 2), "input=float32[batch,4]", torch.randn(2, 4))
    with pytest.raises(NotUsableError, match="opset 25"):
        exporter.export(made, "ort-u8u8", tmp_path / "m.onnx", opset=25)


def test_a_weight_used_twice_is_stored_once(tmp_path: Path) -> None:
    layer = Int8Linear(torch.randn(64, 64))
    made = graph(nn.Sequential(layer, layer), "input=float32[batch,64]", torch.randn(2, 64))
    exporter.export(made, "ort-u8u8", tmp_path / "m.onnx")
    stored = onnx.load(str(tmp_path / "m.onnx")).graph.initializer
    assert [tuple(t.dims) for t in stored if t.data_type == onnx.TensorProto.UINT8].count((64, 64)) == 1
