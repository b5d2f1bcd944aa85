"""The backend trt without a device: the file TensorRT would parse, its profiles, and what it says it needs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backends import trt
from backends.trt import builder, libraries, lowering, runner
from infer import device as hardware
from infer.errors import NotUsableError
from infer.kernels.ops.linear_fp8 import to_float8
from infer.plan import Plan
from infer.spec import TensorSpec
from tests.support.onnx_models import Int8Conv, Int8Linear, Lut, graph, lowered, relative_error

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")


def plan(**changes: Any) -> Plan:
    return Plan(source="x", backend="trt", device="cuda", dtype="float32").with_(**changes)


class Int8Rows(nn.Module):
    """An embedding of 64 int8 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randint(-127, 128, (64, 32), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(64))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return torch.ops.infer.embedding_int8(input, self.codes, self.scale)


class Net(nn.Module):
    """A convolution too narrow for int8, one that is not, and a linear layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = Int8Conv(3, 32, kind), Int8Conv(32, 32, kind)
        self.norm = nn.LayerNorm(32)
        self.last = Int8Linear(torch.randn(24, 32) / 6, kind, torch.randn(24))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        y = torch.relu(self.second(torch.relu(self.first(input))))
        return self.last(self.norm(y.mean((2, 3))))


def written(
    module: nn.Module, sample: Tensor, folder: Path, **changes: Any
) -> tuple[Any, Any, set[str], Tensor]:
    """Write the model for TensorRT; return it, the rewritten layers, required precisions and torch output."""
    sizes = ",".join(map(str, sample.shape[1:]))
    kind = "float32" if sample.is_floating_point() else "int64"
    made = graph(module, f"input={kind}[batch,{sizes}]", sample)
    done, wanted = lowering.write_model(made, plan(**changes), folder / "model.onnx")
    model = onnx.load(str(folder / "model.onnx"))
    return model, done, wanted, made.callable()(input=sample)[0]


def run(folder: Path, sample: Tensor) -> Tensor:
    """Run the file as it is written: ONNX Runtime's fusions would round activations to int8."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options)
    return torch.from_numpy(session.run(None, {"input": sample.numpy()})[0])


@pytest.mark.parametrize(("kind", "dtype"), [("", "float32"), ("_static", "float32"), ("", "float16")])
def test_int8_is_written_as_symmetric_quantize_dequantize_pairs(
    tmp_path: Path, kind: str, dtype: str
) -> None:
    x = torch.rand(4, 3, 8, 8)
    model, done, wanted, want = written(Net(kind), x, tmp_path, quant="int8", dtype=dtype)
    assert done.forms["static int8"] == done.forms["static int8 convolution"] == 1
    assert wanted == ({"int8", dtype} if dtype != "float32" else {"int8"})
    assert relative_error(run(tmp_path, x), want) < 0.05
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    pairs = [node for node in model.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert len(pairs) == 7, "the weight of the narrow convolution is packed, its activations are not"
    for node in pairs:
        assert stored[node.input[2]].dtype == "int8"
        assert not stored[node.input[2]].any(), "TensorRT takes symmetric scales only"


def test_layers_below_sixteen_channels_stay_in_float(tmp_path: Path) -> None:
    module = nn.Sequential(
        Int8Linear(torch.randn(8, 64), "_static"), Int8Linear(torch.randn(64, 8), "_static")
    )
    model, done, wanted, want = written(module, torch.randn(3, 64), tmp_path, quant="int8:static")
    assert done.forms == {"layer in float, too small for int8": 2}
    assert not [node for node in model.graph.node if node.op_type == "QuantizeLinear"]
    assert wanted == set()
    assert want.shape == (3, 64)


def test_opset_is_one_that_tensorrt_parses(tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        model, *_ = written(nn.Linear(16, 16), torch.randn(2, 16), tmp_path, dtype=dtype)
        assert 9 <= model.opset_import[0].version <= 25


@pytest.mark.parametrize("weights", ["blocks", "float"])
@pytest.mark.parametrize(("bits", "group", "tables"), [(2, 64, 1), (3, 64, 2), (4, 16, 1), (6, 64, 2)])
def test_table_layers_stay_packed_unless_refused(
    tmp_path: Path, bits: int, group: int, tables: int, weights: Any
) -> None:
    layers = [Lut(128, 64, bits, tables, group), Lut(128, 48, bits, tables, group)]
    ids = torch.randint(0, 64, (3, 5))
    made = graph(nn.Sequential(*layers), "input=int64[batch,5]", ids)
    done, _ = lowering.write_model(made, plan(quant="nf4"), tmp_path / "model.onnx", weights=weights)
    packed = weights == "blocks"
    assert done.forms == (
        {"rows of table codes, packed in words": 1, "table codes, packed as two int4 halves": 1}
        if packed
        else {"codes decoded when built": 2}
    )
    error = relative_error(run(tmp_path, ids), made.callable()(input=ids)[0])
    assert error < (1e-2 if packed else 1e-5), "a table's entries are rounded to int8"


def test_embedding_rows_are_dequantized_before_the_gather(tmp_path: Path) -> None:
    """int8 and uniform tables: DequantizeLinear first, which TensorRT fuses into the Gather."""
    uniform = Lut(128, 64)
    uniform.table = torch.arange(-8, 8)[None] / 8
    ids = torch.randint(0, 64, (3, 5))
    for name, module in (("int8 rows, packed", Int8Rows()), ("int4 rows, packed in blocks", uniform)):
        model, done, _, want = written(nn.Sequential(module), ids, tmp_path, quant="int8:weight")
        assert done.forms == {name: 1}
        assert [node.op_type for node in model.graph.node] == ["DequantizeLinear", "Gather"]
        assert relative_error(run(tmp_path, ids), want) < 1e-5


@pytest.mark.parametrize(("groups", "weights"), [(1, "blocks"), (4, "blocks"), (1, "float")])
def test_weight_only_convolutions_stay_int8_unless_refused(tmp_path: Path, groups: int, weights: Any) -> None:
    x = torch.rand(2, 8, 6, 6)
    made = graph(nn.Sequential(Int8Conv(8, 12, "_weight", groups)), "input=float32[batch,8,6,6]", x)
    done, wanted = lowering.write_model(
        made, plan(quant="int8:weight"), tmp_path / "model.onnx", weights=weights
    )
    kinds = {node.op_type for node in onnx.load(str(tmp_path / "model.onnx")).graph.node}
    assert ("DequantizeLinear" in kinds) is (weights == "blocks")
    assert relative_error(run(tmp_path, x), made.callable()(input=x)[0]) < 1e-5
    assert wanted == set()


@pytest.mark.parametrize("group", [64, 16])
def test_uniform_tables_become_blockwise_int4(tmp_path: Path, group: int) -> None:
    layer = Lut(128, 48, group=group)
    layer.table = torch.arange(-8, 8)[None] / 8
    module = nn.Sequential(layer)
    x = torch.randn(3, 128)
    model, done, wanted, want = written(module, x, tmp_path, quant="int4")
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    node = next(node for node in model.graph.node if node.op_type == "DequantizeLinear")
    assert stored[node.input[0]].data_type == onnx.TensorProto.INT4
    assert list(stored[node.input[1]].dims) == [128 // group, 48]
    assert {a.name: a.i for a in node.attribute} == {"axis": 0, "block_size": group}
    assert model.opset_import[0].version == 21
    assert wanted == set()
    assert relative_error(run(tmp_path, x), want) < 1e-5
    assert list(done.forms) == ["int4 weights, packed in blocks"]


@pytest.mark.parametrize("weights", ["blocks", "float"])
def test_weight_only_layers_stay_int8_unless_refused(tmp_path: Path, weights: Any) -> None:
    x = torch.randn(3, 64)
    made = graph(nn.Sequential(Int8Linear(torch.randn(32, 64), "_weight")), "input=float32[batch,64]", x)
    done, wanted = lowering.write_model(
        made, plan(quant="int8:weight"), tmp_path / "model.onnx", weights=weights
    )
    model = onnx.load(str(tmp_path / "model.onnx"))
    packed = weights == "blocks"
    assert ("DequantizeLinear" in {node.op_type for node in model.graph.node}) is packed
    assert relative_error(run(tmp_path, x), made.callable()(input=x)[0]) < 1e-5
    assert wanted == set()
    assert list(done.forms) == ["int8 weights, packed" if packed else "layer in float, decoded when built"]


class Float8Linear(nn.Module):
    """A float8 layer of random weights, with activations calibrated from the samples."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        codes, scale = to_float8(torch.randn(rows, columns))
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale[:, 0].contiguous())

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return torch.ops.infer.linear_fp8(input, self.codes, self.scale, None)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_float8_layers_are_pairs_of_quantize_and_dequantize(tmp_path: Path, dtype: str) -> None:
    x = torch.randn(5, 64)
    model, done, wanted, want = written(Float8Linear(64, 48), x, tmp_path, quant="fp8", dtype=dtype)
    assert wanted == ({"fp8"} if dtype == "float32" else {"fp8", dtype})
    operators = [node.op_type for node in model.graph.node if node.op_type != "Cast"]
    assert sorted(operators) == ["DequantizeLinear", "DequantizeLinear", "MatMul", "QuantizeLinear"]
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    weight = next(node for node in model.graph.node if node.input[0] in stored)
    assert stored[weight.input[0]].data_type == onnx.TensorProto.FLOAT8E4M3FN
    assert list(done.forms) == ["float8, a scale per tensor"]
    if dtype == "float32":
        assert relative_error(run(tmp_path, x), want) < 0.05


def test_calibration_needs_samples(tmp_path: Path) -> None:
    made = graph(
        nn.Sequential(Int8Linear(torch.randn(32, 64))), "input=float32[batch,64]", torch.randn(2, 64)
    )
    bare = replace(made, samples={})
    with pytest.raises(NotUsableError, match="needs real inputs to calibrate"):
        lowering.write_model(bare, plan(quant="int8"), tmp_path / "model.onnx")


def test_profiles_follow_symbolic_sizes_and_defaults_are_clamped() -> None:
    inputs = (TensorSpec("x", "float32", ("batch", "time", 8)), TensorSpec("y", "float32", (3,)))
    found = builder.profiles(inputs, {"batch": (1, 4), "time": (2, 512)}, {"batch": 8, "time": 64})
    assert found == {"x": ((1, 2, 8), (4, 64, 8), (4, 512, 8))}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(4, 8), None),
        (torch.zeros(1, 8), None),
        (torch.zeros(0, 8), r"the engine takes input x from [1, 8] to [4, 8], got [0, 8]"),
        (torch.zeros(5, 8), r"the engine takes input x from [1, 8] to [4, 8], got [5, 8]"),
        (torch.zeros(4, 8, 1), r"the engine takes input x from [1, 8] to [4, 8], got [4, 8, 1]"),
        (torch.zeros(4, 8).double(), "expected input x float32, got float64"),
    ],
)
def test_inputs_outside_the_profile_never_reach_the_engine(value: Tensor, words: str | None) -> None:
    spec = TensorSpec("x", "float32", ("batch", 8))
    assert runner.refusal(spec, value, ((1, 8), (4, 8))) == words


def test_layer_precisions_are_read_from_tensors_and_kernel_names() -> None:
    layers = [
        {"Inputs": [{"Format/Datatype": "Row major linear FP16 format"}], "Outputs": [], "TacticName": ""},
        {"Inputs": [{"Format/Datatype": "Half"}], "Outputs": [{"Format/Datatype": "Float"}]},
        {"Inputs": [], "Outputs": [], "TacticName": "sm90_xmma_gemm_i8i8_i8i32_f32_tn_n"},
        {"Inputs": [{"Format/Datatype": "N/A due to dynamic shapes"}], "Outputs": []},
        {"Inputs": [{"Format/Datatype": "BFloat16"}], "Outputs": []},
        "a name only",
    ]
    found = builder.layer_precisions(json.dumps({"Layers": layers}))
    assert found == {"float16": 2, "float32": 1, "int8": 1, "bfloat16": 1}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the sentence of machines without CUDA")
def test_missing_names_the_absent_device_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "module_name", lambda kind: None)
    assert trt.missing() == "no CUDA device"
    monkeypatch.setattr(libraries, "module_name", lambda kind: kind)
    assert trt.missing() == "no CUDA device, but trt:sm_89 builds for one ahead of time"


def test_tensorrt_refusals_have_a_reason() -> None:
    made = graph(nn.Linear(4, 4), "input=float32[batch,4]", torch.randn(2, 4))
    assert trt.refuses(made, plan()) is None
    assert trt.refuses(made, plan(device="cpu")) == "TensorRT runs on CUDA, not on cpu"
    unbounded = replace(made, sizes={})
    assert "needs a smallest and a largest value of batch" in str(trt.refuses(unbounded, plan()))


def test_an_engine_of_another_machine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = {"sm": "90", "gpu": "H200"}
    monkeypatch.setattr(hardware, "fingerprint", lambda device: marks)
    monkeypatch.setattr(libraries, "library_version", lambda kind: "11.4.0")
    monkeypatch.setattr(libraries, "missing", lambda kind: None)
    (tmp_path / "compiled").mkdir()
    (tmp_path / trt.BUILD_INFO).write_text(json.dumps({"sm": "80", "gpu": "H200", "tensorrt": "10.13.0"}))
    with pytest.raises(NotUsableError, match=r"tensorrt 10.13.0, here 11.4.0; sm 80, here 90"):
        trt.open(tmp_path, "cuda")


@pytest.mark.skipif(trt.missing() is not None, reason=trt.missing() or "")
@pytest.mark.parametrize(("dtype", "quant", "bound"), [("float32", "none", 1e-3), ("float16", "int8", 0.1)])
def test_engine_outputs_match_the_exported_program(
    tmp_path: Path, dtype: str, quant: str, bound: float
) -> None:
    module = Net("_static") if quant == "int8" else nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU())
    made = lowered(module, "input=float32[batch,3,8,8]", torch.rand(4, 3, 8, 8), tmp_path)
    findings = trt.lower(made, plan(dtype=dtype, quant=quant), tmp_path).findings
    runner = trt.open(tmp_path, "cuda")
    for rows in (1, 4, 9):
        x = torch.rand(rows, 3, 8, 8)
        got = next(iter(runner.run({"input": x}).values())).cpu()
        assert relative_error(got, made.callable()(input=x)[0]) < bound
    assert any(finding.what == "trt engine" for finding in findings)
    runner.close()
