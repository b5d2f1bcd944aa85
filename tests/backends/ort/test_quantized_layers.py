"""int8 layers in ONNX Runtime: equal to the reference, fused, and near ideal on data that saturates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

from backends.ort.layers import rewriter  # noqa: E402
from backends.ort.layers.int8 import Signs  # noqa: E402
from infer import device  # noqa: E402
from infer.graph import capture  # noqa: E402
from infer.onnx import export as exporter  # noqa: E402
from infer.onnx import ort_session  # noqa: E402
from infer.onnx.rewrite import RewriteResult  # noqa: E402
from infer.spec import TensorSpec  # noqa: E402
from tests.support.onnx_models import ORT_TARGETS, Int8Conv, Int8Linear, graph, relative_error  # noqa: E402


def run(
    module: nn.Module, x: torch.Tensor, path: Path, signs: Signs
) -> tuple[torch.Tensor, torch.Tensor, dict[str, int], RewriteResult]:
    """Output of ONNX Runtime, that of the reference, the operators that ran, and the forms that were taken."""
    sizes = ",".join(map(str, x.shape[1:]))
    made = graph(module, f"input=float32[batch,{sizes}]", x)
    done = exporter.export(made, path / "model.onnx", rewriter(signs))
    opened = ort_session.open_session(path / "model.onnx", "cpu")
    got = torch.from_numpy(opened.run(None, {"input": x.numpy()})[0])
    return got, made.callable()(input=x)[0], ort_session.count_executed_ops(path / "model.onnx", "cpu"), done


def two_layers(kind: str) -> nn.Sequential:
    first, second = torch.randn(96, 64) / 8, torch.randn(32, 96) / 8
    return nn.Sequential(
        Int8Linear(first, kind, torch.randn(96)), nn.GELU(), Int8Linear(second, kind, step=0.02)
    )


@pytest.mark.parametrize("signs", ORT_TARGETS)
def test_dynamic_linear_equals_the_reference_whatever_one_token_holds(tmp_path: Path, signs: Signs) -> None:
    x = torch.randn(3, 5, 64)
    x[0, 0] *= 100
    x[1, 1] = 0
    got, want, nodes, _ = run(two_layers(""), x, tmp_path, signs)
    assert relative_error(got[1:], want[1:]) < 1e-5
    assert relative_error(got, want) < 1e-5
    assert nodes["MatMulInteger"] == 2


@pytest.mark.parametrize("signs", ORT_TARGETS)
def test_static_linear_equals_the_reference(tmp_path: Path, signs: Signs) -> None:
    got, want, nodes, _ = run(two_layers("_static"), torch.randn(3, 5, 64), tmp_path, signs)
    assert relative_error(got, want) < 0.01  # the runtime may clip at -128 where the reference clips at -127
    assert nodes["MatMulInteger"] + nodes["MatMulIntegerToFloat"] == 2


def test_weight_only_linear_is_int8_in_the_file_and_close_to_the_reference(tmp_path: Path) -> None:
    model = nn.Sequential(Int8Linear(torch.randn(512, 512) / 16, "_weight"))
    got, want, _, _ = run(model, torch.randn(3, 5, 512), tmp_path, "ort-u8u8")
    assert relative_error(got, want) < 0.02
    assert exporter.folder_bytes(tmp_path / "model.onnx") < 512 * 512 * 1.1


def saturating(rows: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Build the last two rows of the saturation table: products of one sign, sums far above 16 bits."""
    x = torch.rand(16, 256) + (1.0 if rows == "same sign" else 0.0)
    weight = torch.rand(64, 256) + 0.5 if rows == "same sign" else torch.rand(64, 256) * 2 - 1
    return x, weight


@pytest.mark.parametrize("rows", ["uniform weights, positive activations", "same sign"])
@pytest.mark.parametrize("kind", ["", "_static"])
def test_int8_products_do_not_saturate(tmp_path: Path, rows: str, kind: str) -> None:
    x, weight = saturating(rows)
    signs: Signs = "ort-u8s8" if device.has_vnni() else "ort-u8u8"
    layer = Int8Linear(weight, kind, step=float(x.abs().max()) / 127)
    got, want, _, _ = run(nn.Sequential(layer), x, tmp_path, signs)
    exact = x @ weight.T
    ideal = relative_error(want, exact)
    assert relative_error(got, exact) <= ideal * 1.05 + 1e-5
    assert relative_error(got, want) < 1e-5


@pytest.mark.parametrize("rows", ["uniform weights, positive activations", "same sign"])
def test_unsigned_weights_are_exact_on_any_cpu(tmp_path: Path, rows: str) -> None:
    x, weight = saturating(rows)
    got, want, _, _ = run(nn.Sequential(Int8Linear(weight)), x, tmp_path, "ort-u8u8")
    assert relative_error(got, want) < 1e-5


def convolutions(kind: str) -> nn.Sequential:
    last = Int8Linear(torch.randn(10, 32 * 16) / 16, kind)
    blocks = (Int8Conv(3, 32, kind), nn.ReLU(), nn.MaxPool2d(2), Int8Conv(32, 32, kind, stride=2), nn.ReLU())
    return nn.Sequential(*blocks, Int8Conv(32, 32, kind, groups=32), nn.ReLU(), nn.Flatten(), last)


@pytest.mark.parametrize("signs", ORT_TARGETS)
def test_static_convolutions_become_qlinearconv(tmp_path: Path, signs: Signs) -> None:
    x = torch.randn(3, 3, 16, 16)
    torch.manual_seed(1)
    static = convolutions("_static")
    torch.manual_seed(1)
    exact = convolutions("_weight")(x)
    got, want, nodes, done = run(static, x, tmp_path, signs)
    assert nodes["QLinearConv"] == 3
    assert nodes["Conv"] == 0
    assert relative_error(got, exact) < relative_error(want, exact) * 1.1
    assert not done.in_float


@pytest.mark.parametrize("kind", ["", "_weight"])
def test_unsupported_convolutions_stay_float_and_are_reported(tmp_path: Path, kind: str) -> None:
    got, want, nodes, done = run(convolutions(kind), torch.randn(3, 3, 16, 16), tmp_path, "ort-u8u8")
    assert nodes["ConvInteger"] == 0
    assert nodes["Conv"] == 3
    assert len(done.in_float) == 3 + (kind == "_weight")  # and the linear layer
    assert nodes["DequantizeLinear"] == 0, "weights would be decoded at every call"
    assert relative_error(got, want) < 0.03


class Pyramid(nn.Module):
    """Convolutions of which a later node reads the size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Int8Conv(3, 8, "_weight", stride=2), Int8Conv(8, 8, "_weight", stride=2)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        large = self.first(input)
        large = torch.minimum(large, torch.full(large.shape, 0.5))
        return large + nn.functional.interpolate(self.second(large), size=large.shape[2:])


def test_the_size_of_a_convolution_is_read_without_computing_it_again(tmp_path: Path) -> None:
    specs = (TensorSpec.parse("input=float32[batch,3,height,width]"),)
    sizes = {"batch": (1, 64), "height": (16, 128), "width": (16, 128)}
    made = capture.capture(
        Pyramid().eval(),
        specs,
        {"input": torch.randn(2, 3, 32, 64)},
        sizes=sizes,
        multiples={"height": 16, "width": 16},
    )
    exporter.export(made, tmp_path / "model.onnx", rewriter("ort-u8u8"))
    written = onnx.load(str(tmp_path / "model.onnx"), load_external_data=False)
    assert [node.op_type for node in written.graph.node].count("Conv") == 2
    opened = ort_session.open_session(tmp_path / "model.onnx", "cpu")
    for shape in ((1, 3, 16, 16), (3, 3, 32, 48)):
        x = torch.randn(shape)
        got = torch.from_numpy(opened.run(None, {"input": x.numpy()})[0])
        assert relative_error(got, made.callable()(input=x)[0]) < 1e-5


def test_float16_activations_are_widened_around_the_integers(tmp_path: Path) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Int8Linear(torch.randn(32, 64), "", torch.randn(32))

        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
            return self.layer(input.half()).float()

    got, want, _, _ = run(Half(), torch.randn(3, 64), tmp_path, "ort-u8u8")
    assert np.isfinite(got.numpy()).all()
    assert relative_error(got, want) < 2e-3
