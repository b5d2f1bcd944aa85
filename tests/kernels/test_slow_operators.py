"""Operators that are far slower, or wrong, on CPUs without VNNI can't be reached from `infer`, after upgrades neither.

Measured costs over float32: 10× (`_weight_int8pack_mm`), 21× (`_weight_int4pack_mm_for_cpu`), 165× (`_int_mm`); in ONNX
Runtime 8-bit MatMulNBits without accuracy_level 4 80×, MatMulBnb4 4×, and signed int8 weights without VNNI saturate.
"""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infer import compress, kernels, plugins
from infer.compress import calibrate
from infer.errors import NotUsableError
from infer.graph import capture, storage
from infer.graph.program import Graph
from infer.kernels.passes import prepack
from infer.library_errors import quiet
from infer.plan import Plan
from infer.spec import TensorSpec

ROOT = Path(__file__).resolve().parents[2]
OPERATORS = (
    "_int_mm", "_weight_int8pack_mm", "_weight_int4pack_mm", "_weight_int4pack_mm_for_cpu", "linear_dynamic",
    "quantize_dynamic", "_dyn_quant_matmul_4bit",
)  # fmt: skip
CUDA_ONLY = ROOT / "infer/kernels/gpu"  # cuBLASLt behind `_int_mm` is what int8 on a GPU should use
OPTIONAL = [name for name in ("int4", "fp4") if name in plugins.names("infer.compress.formats")]
FORMATS = {
    "embed": "nf4", "convs.0": "int8", "convs.1": "int8:weight", "convs.2": "int8:static", "linears.0": "int8",
    "linears.1": "int8:weight", "linears.2": "int8:static", "linears.3": "nf4", "linears.4": "cluster:2",
    "linears.5": "cluster:3", "linears.6": "cluster:4", "linears.7": "cluster:6",
    **{f"linears.{8 + i}": name for i, name in enumerate(OPTIONAL)},
}  # fmt: skip


class Everything(nn.Module):
    """A layer for each format, and attention with shared key heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.convs = nn.ModuleList(nn.Conv2d(64, 64, 3, padding=1) for _ in range(3))
        self.linears = nn.ModuleList(nn.Linear(64, 64) for _ in range(10))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        image = x.transpose(1, 2).unflatten(-1, (4, 4))
        for conv in self.convs:
            image = conv(image).relu()
        x = x + image.flatten(2).transpose(1, 2)
        for linear in self.linears:
            x = x + linear(x).tanh()
        return x


@pytest.fixture(scope="module")
def graph() -> Graph:
    torch.manual_seed(0)
    model, samples = Everything().eval(), {"ids": torch.randint(0, 100, (4, 16))}
    plan = Plan(source="x", quant="int8")
    compress.quantize_model(model, plan, formats=FORMATS, stats=calibrate(model, [samples]))
    return capture.capture(model, (TensorSpec("ids", "int64", ("batch", 16)),), samples)


def forbidden(program: torch.export.ExportedProgram) -> list[str]:
    found = []
    for node in program.graph.nodes:
        name = str(node.target)
        if node.op == "call_function" and any(part in OPERATORS for part in name.split(".")):
            found.append(name)
        if node.kwargs.get("enable_gqa"):
            found.append(f"{name} enable_gqa")
    return found


def test_the_model_of_these_tests_has_a_layer_of_each_format(graph: Graph) -> None:
    used = {str(n.target) for n in graph.exported.graph.nodes}
    for name in (
        "linear_codes",
        "linear_int8",
        "linear_int8_static",
        "linear_int8_weight",
        "embedding_codes",
    ):
        assert f"infer.{name}.default" in used
    for name in ("conv2d_int8", "conv2d_int8_static", "conv2d_int8_weight"):
        assert f"infer.{name}.default" in used


def test_no_program_calls_a_slow_operator_in_any_form(graph: Graph) -> None:
    program = graph.exported
    assert forbidden(program) == []
    with quiet():
        assert forbidden(program.run_decompositions(kernels.decompositions())) == []
    if prepack.usable(program):
        assert forbidden(prepack.packed(program)) == []


def test_no_compiled_package_calls_a_slow_operator(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read the C++ that AOTInductor generates; compiling it would take most of a minute and add no call."""
    from torch._inductor.codecache import AotCodeCompiler

    backend = plugins.get("backends", "inductor")
    if reason := backend.missing():
        pytest.skip(reason)
    generated: list[str] = []

    def stop(_: Any, wrapper: str, kernels: str, extern_nodes: str | None, **__: Any) -> None:
        generated.extend((wrapper, kernels, extern_nodes or ""))
        raise RuntimeError("stopped before the C++ compiler")

    monkeypatch.setattr(AotCodeCompiler, "compile", stop)
    storage.save(graph, tmp_path)
    with pytest.raises(NotUsableError, match="stopped before the C\\+\\+ compiler"):
        backend.lower(graph, Plan(source="x", quant="int8", device="cpu"), tmp_path)
    text = "".join(generated)
    assert "linear" in text
    assert len(text) > 10_000
    assert [name for name in OPERATORS if name in text] == []


@pytest.mark.parametrize("signs", ["ort-u8u8", "ort-u8s8"])
def test_no_onnx_file_contains_a_slow_operator(graph: Graph, tmp_path: Path, signs: Any) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    from backends.ort.layers import rewriter
    from infer.onnx import export

    path = tmp_path / "compiled" / "model.onnx"
    export.export(graph, path, rewriter(signs))
    model = onnx.load(path, load_external_data=False)
    held = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    wrong = []
    for node in model.graph.node:
        level = next((a.i for a in node.attribute if a.name == "accuracy_level"), None)
        if node.op_type == "MatMulBnb4" or (node.op_type == "MatMulNBits" and level != 4):
            wrong.append(f"{node.op_type} accuracy_level {level}")
        signed = [i for i in node.input if held.get(i) == onnx.TensorProto.INT8]
        integer = node.op_type in (
            "MatMulInteger",
            "DynamicQuantizeMatMul",
            "QLinearMatMul",
            "QLinearConv",
            "ConvInteger",
        )
        if signs == "ort-u8u8" and integer and signed:
            wrong.append(f"{node.op_type} with signed weights {signed}")
    assert len(model.graph.node) > 50
    assert wrong == []


def test_without_vnni_onnx_runtime_gets_unsigned_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    ort = plugins.get("backends", "ort")
    monkeypatch.setattr(ort, "hardware", SimpleNamespace(has_vnni=lambda: False))
    assert ort._signs("cpu") == "ort-u8u8"


def test_no_source_file_uses_a_slow_operator() -> None:
    """Nor `torch.ao`, which torch is about to remove."""
    used = []
    for path in (*(ROOT / "infer").rglob("*.py"), *(ROOT / "backends").rglob("*.py")):
        if CUDA_ONLY in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Attribute(attr=name) | ast.Name(id=name) if name in (*OPERATORS, "ao"):
                    used.append(f"{path.name}:{node.lineno}: {name}")
                case ast.keyword(arg="enable_gqa") | ast.Constant(value="MatMulBnb4"):
                    used.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert used == []


def test_attention_of_a_language_model_has_no_grouped_heads_flag() -> None:
    pytest.importorskip("transformers")
    from infer.run import stages

    run = stages.resolve(Plan(source=str(ROOT / "models/pydoc_lm"), backend="eager"))
    program = stages.float_graph(stages.load(run)[0]).exported
    assert any("scaled_dot_product" in str(node.target) for node in program.graph.nodes)
    assert forbidden(program) == []
