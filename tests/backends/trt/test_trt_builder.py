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

from backends.trt import builder as trt_builder
from backends.trt import libraries, lowering
from infer.plan import Plan
from tests.support.onnx_models import Int8Conv, Int8Linear, Lut, graph

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
FOLDER = Path(__file__).resolve().parents[3] / ".trt"
SMS = libraries.RTX_GROUPS[-1]


@pytest.fixture(scope="module", autouse=True)
def builder() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(FOLDER)])
        importlib.invalidate_caches()
        if reason := libraries.missing(libraries.RTX):
            pytest.skip(f"{reason}; or: make trt")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the extension module
            yield libraries.imported(libraries.RTX)


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
    "nf4": (lambda: Lut(256, 128), 256, "table codes, packed as two int4 halves"),
    "fp8": (Float8Linear, 64, "float8, a scale per tensor"),
}


def built(module: nn.Module, text: str, sample: Tensor, folder: Path, **changes: Any) -> lowering.Built:
    torch.manual_seed(0)
    plan = Plan(source="x", backend="trt:rtx", device="cuda").with_(**changes)
    made = graph(module, text, sample)
    return lowering.build(
        made, plan, folder / "model.onnx", trt_builder.BuildOptions(libraries.RTX, None, SMS)
    )


@pytest.mark.parametrize("quant", list(FORMS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_builder_takes_every_weight_form(tmp_path: Path, quant: str, dtype: str) -> None:
    make, columns, form = FORMS[quant]
    text = LINEAR.format(columns)
    found = built(nn.Sequential(make()), text, torch.randn(3, columns), tmp_path, quant=quant, dtype=dtype)
    assert list(found.rewritten.forms) == ([form] if form else [])
    assert found.unpacked == ""
    assert len(found.engine.blob) > 10_000


def test_the_builder_takes_static_int8_convolutions(tmp_path: Path) -> None:
    x = torch.rand(4, 32, 8, 8)
    found = built(Net(), "input=float32[batch,32,8,8]", x, tmp_path, quant="int8", dtype="float16")
    assert found.rewritten.forms == {"static int8": 1, "static int8 convolution": 1}


class Int8Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randint(-127, 128, (1024, 512), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(1024))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return torch.ops.infer.embedding_int8(input, self.codes, self.scale)


def uniform() -> nn.Module:
    layer = Lut(512, 1024)
    layer.table = torch.arange(-8, 8)[None] / 8
    return layer


IDS, ROWS = "input=int64[batch,5]", "input=float32[batch,512]"
# Bits that the builder may keep of a weight, its scales included: 16 or 32 bits for each 64 weights, or each row.
BITS: dict[str, tuple[Any, str, float]] = {
    "float": (lambda: nn.Linear(512, 1024, bias=False), ROWS, 16),
    "int8": (lambda: Int8Linear(torch.randn(1024, 512), "_weight"), ROWS, 8 + 32 / 512),
    "int4": (uniform, ROWS, 4 + 16 / 64),
    "table": (lambda: Lut(512, 1024), ROWS, 8 + 2 * 16 / 64),
    "int8 rows": (Int8Rows, IDS, 8 + 40 / 512),
    "int4 rows": (uniform, IDS, 4 + 32 / 64),
    "table rows": (lambda: Lut(512, 1024), IDS, 4 + 32 / 64),
    "3-bit table rows": (lambda: Lut(512, 1024, 3, 32), IDS, 3.25 + 32 / 64),
}


@pytest.mark.parametrize("form", list(BITS))
def test_the_engine_keeps_packed_weights_packed(tmp_path: Path, form: str) -> None:
    make, text, bits = BITS[form]
    x = torch.randint(0, 1024, (3, 5)) if text == IDS else torch.randn(3, 512)
    found = built(nn.Sequential(make()), text, x, tmp_path, quant="nf4", dtype="bfloat16").engine
    assert found.weight_bytes is not None
    assert found.weight_bytes * 8 / (1024 * 512) < bits * 1.02
    whole = 1024 * 512 * 2
    if text == IDS:
        assert (found.scratch_bytes or 0) < whole, "the whole table is decoded"


def test_packed_weights_the_builder_refuses_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = trt_builder.build

    def refuses_packed(model: Path, *args: Any) -> Any:
        if b"DequantizeLinear" in model.read_bytes():
            raise trt_builder.BuilderError("no DequantizeLinear here")
        return real(model, *args)

    monkeypatch.setattr(trt_builder, "build", refuses_packed)
    x = torch.randn(3, 256)
    found = built(nn.Sequential(int4()), LINEAR.format(256), x, tmp_path, quant="int4")
    assert found.unpacked == "no DequantizeLinear here"
    assert list(found.rewritten.forms) == ["codes decoded when built"]


@pytest.mark.parametrize("tf32", [False, True])
def test_tf32_is_on_only_where_it_was_asked_for(builder: Any, tf32: bool) -> None:
    made = builder.Builder(builder.Logger(builder.Logger.ERROR))
    config = trt_builder._config(builder, made, {}, trt_builder.BuildOptions(libraries.RTX, None, SMS, tf32))
    assert config.get_flag(builder.BuilderFlag.TF32) is tf32
    assert config.num_compute_capabilities == len(SMS)


def test_the_table_of_capabilities_is_the_builders(builder: Any) -> None:
    names = builder.ComputeCapability.__members__
    assert {f"SM{sm}" for sm in libraries.RTX_CAPABILITIES} == {n for n in names if n.startswith("SM")}


def test_a_parser_error_names_the_node(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    info = [onnx.helper.make_tensor_value_info(name, 1, [2]) for name in "xy"]
    node = onnx.helper.make_node("Nowhere", ["x"], ["y"], name="the_node", domain="nobody")
    made = onnx.helper.make_model(onnx.helper.make_graph([node], "g", info[:1], info[1:]), ir_version=10)
    onnx.save(made, tmp_path / "model.onnx")
    options = trt_builder.BuildOptions(libraries.RTX, None, SMS)
    with pytest.raises(
        trt_builder.BuilderError, match=r"TensorRT-RTX can't read the model: the_node \(Nowhere\)"
    ):
        trt_builder.build(tmp_path / "model.onnx", {}, tmp_path / "timing", set(), options)
