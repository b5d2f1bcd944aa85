"""NVIDIA's builder (TensorRT-RTX) takes what the backend trt writes; `make trt` installs it, else these are skipped."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infer.onnx import trt_build, trt_engine, trt_library
from infer.plan import Plan
from tests.support.onnx_models import Int8Conv, Int8Linear, Lut, graph

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
FOLDER = Path(__file__).resolve().parents[2] / ".trt"
SMS = trt_library.RTX_GROUPS[-1]


@pytest.fixture(scope="module", autouse=True)
def builder() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(FOLDER)])
        importlib.invalidate_caches()
        if reason := trt_library.missing(trt_library.RTX):
            pytest.skip(f"{reason}; or: make trt")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the extension module
            yield trt_library.imported(trt_library.RTX)


class Float8Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", (torch.randn(64, 64) * 100).to(torch.float8_e4m3fn))
        self.register_buffer("scale", torch.rand(64) / 448)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.infer.linear_fp8(x, self.codes, self.scale, None)


class Net(nn.Module):
    """A static int8 convolution and a static int8 linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = Int8Conv(32, 32, "_static")
        self.last = Int8Linear(torch.randn(32, 32) / 6, "_static")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return self.last(torch.relu(self.conv(input)).mean((2, 3)))


def int4() -> nn.Module:
    layer = Lut(256, 128)
    layer.table = torch.arange(-8, 8)[None] / 8
    return layer


LINEAR = "input=float32[batch,{}]"
FORMS: dict[str, tuple[Any, int, str]] = {  # quant → module, columns, form in the file
    "none": (lambda: nn.Linear(256, 128), 256, ""),
    "int8:weight": (
        lambda: Int8Linear(torch.randn(128, 256), "_weight"),
        256,
        "int8 weights, packed",
    ),
    "int4": (int4, 256, "int4 weights, packed in blocks"),
    "nf4": (lambda: Lut(256, 128), 256, "codes decoded when built"),
    "fp8": (Float8Linear, 64, "float8, a scale per tensor"),
}


def built(module: nn.Module, text: str, sample: Tensor, folder: Path, **changes: Any) -> trt_build.Built:
    torch.manual_seed(0)
    plan = Plan(source="x", backend="trt:rtx", device="cuda").with_(**changes)
    made = graph(module, text, sample)
    return trt_build.build(
        made, plan, folder / "model.onnx", trt_engine.BuildOptions(trt_library.RTX, None, SMS)
    )


@pytest.mark.parametrize("quant", list(FORMS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_builder_takes_every_weight_form(tmp_path: Path, quant: str, dtype: str) -> None:
    make, columns, form = FORMS[quant]
    text = LINEAR.format(columns)
    found = built(nn.Sequential(make()), text, torch.randn(3, columns), tmp_path, quant=quant, dtype=dtype)
    assert list(found.rewritten.forms) == ([form] if form else [])
    assert found.unpacked == ""
    assert len(found.blob) > 10_000


def test_the_builder_takes_static_int8_convolutions(tmp_path: Path) -> None:
    x = torch.rand(4, 32, 8, 8)
    found = built(Net(), "input=float32[batch,32,8,8]", x, tmp_path, quant="int8", dtype="float16")
    assert found.rewritten.forms == {"static int8": 1, "static int8 convolution": 1}


def test_packed_weights_make_the_engine_smaller(tmp_path: Path) -> None:
    text, x = LINEAR.format(1024), torch.randn(3, 1024)
    wide, narrow = Lut(1024, 1024), Lut(1024, 1024)  # a random table is decoded, a uniform one stays packed
    narrow.table = torch.arange(-8, 8)[None] / 8
    sizes = {}
    for name, module in (("decoded", wide), ("packed", narrow)):
        folder = tmp_path / name
        folder.mkdir()
        sizes[name] = len(built(nn.Sequential(module), text, x, folder, quant="int4", dtype="float16").blob)
    assert sizes["decoded"] - sizes["packed"] > 1024 * 1024


def test_packed_weights_the_builder_refuses_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = trt_engine.build

    def refuses_packed(model: Path, *args: Any) -> Any:
        if b"DequantizeLinear" in model.read_bytes():
            raise trt_engine.BuilderError("no DequantizeLinear here")
        return real(model, *args)

    monkeypatch.setattr(trt_engine, "build", refuses_packed)
    x = torch.randn(3, 256)
    found = built(nn.Sequential(int4()), LINEAR.format(256), x, tmp_path, quant="int4")
    assert found.unpacked == "no DequantizeLinear here"
    assert list(found.rewritten.forms) == ["codes decoded when built"]


@pytest.mark.parametrize("tf32", [False, True])
def test_tf32_is_on_only_where_it_was_asked_for(builder: Any, tf32: bool) -> None:
    made = builder.Builder(builder.Logger(builder.Logger.ERROR))
    config = trt_engine._config(builder, made, {}, trt_engine.BuildOptions(trt_library.RTX, None, SMS, tf32))
    assert config.get_flag(builder.BuilderFlag.TF32) is tf32
    assert config.num_compute_capabilities == len(SMS)


def test_the_table_of_capabilities_is_the_builders(builder: Any) -> None:
    names = builder.ComputeCapability.__members__
    assert {f"SM{sm}" for sm in trt_library.RTX_CAPABILITIES} == {n for n in names if n.startswith("SM")}


def test_the_parsers_words_name_the_node(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    info = [onnx.helper.make_tensor_value_info(name, 1, [2]) for name in "xy"]
    node = onnx.helper.make_node("Nowhere", ["x"], ["y"], name="the_node", domain="nobody")
    made = onnx.helper.make_model(onnx.helper.make_graph([node], "g", info[:1], info[1:]), ir_version=10)
    onnx.save(made, tmp_path / "model.onnx")
    options = trt_engine.BuildOptions(trt_library.RTX, None, SMS)
    with pytest.raises(
        trt_engine.BuilderError, match=r"TensorRT-RTX can't read the model: the_node \(Nowhere\)"
    ):
        trt_engine.build(tmp_path / "model.onnx", {}, tmp_path / "timing", set(), options)
