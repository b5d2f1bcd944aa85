"""ONNX Runtime backend: the program exported to ONNX, int8 layers written for the instruction set at hand.

The step of a language model runs on CPUs, its cache bound where it lies: see `layers/paged_attention.py`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from infer import device as hardware
from infer.distribution import install
from infer.errors import ArtifactError, NotUsableError
from infer.graph import storage
from infer.graph.program import Graph, OnnxGraph, OpenvinoGraph, TorchGraph
from infer.onnx import decompositions, ort_session, packages
from infer.onnx import export as exporter
from infer.onnx.layers import operands, paged_attention_node
from infer.onnx.layers.operands import Weights
from infer.onnx.ort_session import OrtRunner
from infer.onnx.rewrite import RewriteResult
from infer.onnx.source import FORMATS, FP16, INT8, OPTION, WEIGHTS
from infer.plan import Plan
from infer.plugins import BackendOption
from infer.results import IN_FLOAT, LayerForm, Lowered
from infer.rows import count, cut
from infer.spec import Finding, TensorSpec

from . import int8_signedness, integer_or_float
from .integer_or_float import FLOAT, PRODUCTS
from .layers import integer_layers, rewriter
from .layers.int8 import Signs

if TYPE_CHECKING:
    from .step_runner import OrtEncoderRunner, OrtStepRunner

EXECUTES_CODE = False
PORTABLE = True
STEPS = True
CODES = False
MODEL = Path("compiled") / "model.onnx"
ROWS = 8  # of a call that calibrates
SETTINGS = Path("compiled") / "session.json"
OPTIONS = {
    "spinning": BackendOption(
        "threads wait for work in a loop: off spares CPU time, and latency where other work has the cores",
        ("on", "off"),
        ("latency", "throughput"),
    ),
    "optimization": BackendOption(
        "graph optimizations; where all of them change an answer the highest level that keeps it serves",
        ort_session.LEVELS,
    ),
    PRODUCTS: BackendOption(
        "int8 and table layers compute with integers or with weights decoded once, as is faster; float always decodes",
        ("faster", FLOAT),
    ),
    OPTION: WEIGHTS,
}
CAUTIOUS = ("optimization", ort_session.LEVELS[1:])
_FUSED = ("DynamicQuantizeMatMul", "MatMulIntegerToFloat", "MatMulNBits", "QLinearConv", "MatMulInteger")


def missing() -> str | None:
    """Return the first required package that is not installed, with its install command, or None."""
    return packages.missing("ort", "onnxruntime")


def refuses(graph: Graph, plan: Plan) -> str | None:
    """Refuse bfloat16 on CPU, CUDA without CUDA kernels, and formats that an ONNX source can't take."""
    if (kind := paged_attention_node.kv_dtype(graph.nodes)) is not None and (
        reason := _step_refused(graph, plan, kind)
    ):
        return reason
    if any(spec.name == "state_cache" for spec in graph.inputs):
        return "layers with state of their own have no ONNX form here; use --backend inductor or eager"
    if reason := decompositions.refused(graph.nodes):
        return reason
    if isinstance(graph, OpenvinoGraph):
        return graph.no_program
    if plan.device.startswith("cuda"):
        import onnxruntime

        if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            return f"this onnxruntime has no CUDA ({install('gpu')})"
        if plan.quant_name == "int8" and plan.quant_option != "weight":
            return "ONNX Runtime multiplies int8 activations on CPU only; use --backend trt or inductor"
    elif plan.dtype == "bfloat16" or _uses_dtype(graph, torch.bfloat16):
        return "ONNX Runtime has no bfloat16 kernels for CPU; use --dtype fp32"
    elif not plan.device.startswith("cpu"):
        return f"ONNX Runtime does not run on {plan.device} here"
    if isinstance(graph, OnnxGraph):
        from infer.onnx.source import onnx_source

        return onnx_source.refusal(graph, plan, (*FORMATS, "int8:static"))
    return None


def _step_refused(graph: Graph, plan: Plan, kind: str) -> str | None:
    if not plan.device.startswith("cpu"):
        return "ONNX Runtime generates on CPUs only here; use --backend inductor"
    if kind in ("int8", "float8_e4m3fn"):
        return f"no operator of ONNX Runtime reads a paged {kind} cache; ask for a float16 cache"
    if any(node.args[8] is not None for node in paged_attention_node.attention_nodes(graph.nodes)):
        return "attention sinks have no ONNX form here; use --backend inductor"
    return None


def target(device: str) -> dict[str, str]:
    """Return no constraints: the ONNX file runs anywhere, and int8 weights change signedness when it is opened."""
    return {}


def layer_form(tensors: Mapping[str, torch.Tensor]) -> LayerForm | None:
    """Return the one form of tables that are not evenly spaced, of each int8 format and of fp16; None for others."""
    if (group := operands.group_of_any_table(tensors)) is not None:
        return LayerForm(f"8-bit blocks of {group}", decoded_if_slower=True)
    if kind := next((name for name in ("weight_scale", "x_scale", "scale") if name in tensors), ""):
        name = {torch.int8: INT8, torch.float16: FP16}.get(tensors["codes"].dtype)
        known = name is not None and "table" not in tensors
        return LayerForm(f"{name} by {kind}", decoded_if_slower=True) if known else None
    return None


def lower(graph: Graph, plan: Plan, folder: Path) -> Lowered:
    """Write compiled/model.onnx and its data; the findings list the nodes that ONNX Runtime runs."""
    path, signs, more_exact = folder / MODEL, _signs(plan.device), tuple[tuple[str, str], ...]()
    if isinstance(graph, OnnxGraph):
        (done, coverage), chosen, more_exact = _lower_file(graph, plan, path, signs)
    else:
        (done, coverage), chosen = integer_or_float.choose(
            graph,
            plan,
            path,
            lambda to, weights: (exporter.export(graph, to, rewriter(signs, weights)), None),
            is_decode_step=_is_step(graph.inputs),
        )
    settings = _settings(plan)
    if settings != ort_session.USUAL:
        (folder / SETTINGS).write_bytes(msgspec.json.encode(settings))
    start = time.perf_counter()
    nodes = ort_session.count_executed_ops(path, plan.device, settings=settings)
    seconds = time.perf_counter() - start
    findings = [
        _finding("opset", exporter.opset(path)),
        _finding("model", exporter.folder_bytes(path), "B"),
        _finding("nodes", nodes.total(), why="after ONNX Runtime's fusions"),
        _finding("session opened in", seconds, "s", "graph optimizations, and decoding of packed weights"),
        *_half_findings(plan),
        *_layer_findings(done, nodes, signs),
        *chosen,
    ]
    if integer_layers(done) and PRODUCTS not in plan.backend_options:
        more_exact = ((PRODUCTS, FLOAT), *more_exact)
    return Lowered(findings, coverage, more_exact)


def _lower_file(
    graph: OnnxGraph, plan: Plan, path: Path, signs: Signs
) -> tuple[integer_or_float.Written, list[Finding], tuple[tuple[str, str], ...]]:
    """Write the file of an ONNX source; the options of `Lowered.more_exact` come last."""
    from infer.onnx.source import onnx_source

    if plan.quant == "none":
        onnx_source.copy(graph.path, path)
        return (RewriteResult(), None), [], ()
    is_static = plan.quant_option == "static"
    format, rows = onnx_source.weight_format(plan), onnx_source.few_rows(graph)
    ranges = onnx_source.input_ranges(graph.path, list(_batches(graph))) if is_static else None

    def write(to: Path, weights: Weights) -> integer_or_float.Written:
        layers = None if weights == "float" and not is_static else rewriter(signs, weights)
        return onnx_source.quantize(graph.path, to, layers, ranges, format, rows)

    return *integer_or_float.choose(graph, plan, path, write), onnx_source.more_exact(plan)


def _batches(graph: OnnxGraph) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the calibration rows of an ONNX source in calls of a few."""
    if graph.calibration:
        for start in range(0, count(graph.inputs, graph.calibration), ROWS):
            yield cut(graph.inputs, graph.calibration, start, start + ROWS)


def _settings(plan: Plan) -> ort_session.SessionSettings:
    options = plan.backend_options
    level = options.get("optimization", ort_session.USUAL.optimization)
    return ort_session.SessionSettings(options.get("spinning") != "off", level)


def open(folder: Path, device: str) -> OrtRunner | OrtStepRunner | OrtEncoderRunner:
    """Open compiled/model.onnx on `device`, named and typed by the artifact's signature."""
    signature = storage.load_signature(folder)
    settings = ort_session.USUAL
    if (folder / SETTINGS).exists():
        settings = msgspec.json.decode((folder / SETTINGS).read_bytes(), type=ort_session.SessionSettings)
    path = int8_signedness.adapt_signedness(folder / MODEL, _signs(device))
    try:
        if _is_step(signature.inputs):
            from .step_runner import OrtEncoderRunner, OrtStepRunner

            kind = OrtEncoderRunner if signature.task == "encoder" else OrtStepRunner
            return kind(path, signature.inputs, signature.outputs, settings)
        return OrtRunner(path, signature.inputs, signature.outputs, device, settings=settings)
    except NotUsableError as error:
        if not ort_session.is_damaged(error):
            raise
        raise ArtifactError(error.message, where=str(folder / MODEL)) from error


def _is_step(inputs: tuple[TensorSpec, ...]) -> bool:
    return any(spec.name == "kv_cache" for spec in inputs)


def _signs(device: str) -> Signs:
    return "ort-u8s8" if device.startswith("cuda") or hardware.has_vnni() else "ort-u8u8"


def _finding(what: str, value: float | str, unit: str = "", why: str = "") -> Finding:
    return Finding("lower", f"ort {what}", value, unit, why)


def _uses_dtype(graph: Graph, dtype: torch.dtype) -> bool:
    if not isinstance(graph, TorchGraph):
        return False
    state = (*graph.program.state_dict.values(), *graph.program.constants.values())
    return any(isinstance(value, torch.Tensor) and value.dtype == dtype for value in state)


def _layer_findings(done: RewriteResult, nodes: Counter[str], signs: Signs) -> list[Finding]:
    """List the form of each layer with its reason, and the weights that don't stay packed in memory."""
    why = {
        "ort-u8u8": "weights unsigned: without VNNI, signed ones saturate",
        "ort-u8s8": "weights signed: this machine multiplies them without saturating",
    }[signs]
    findings = [
        _finding(f"layers as {form}", count, why="" if "blocks" in form else why)
        for form, count in sorted(done.forms.items())
    ]
    fused = {op: nodes[op] for op in _FUSED if nodes[op]}
    if done.forms and fused:
        text = ", ".join(f"{count} {op}" for op, count in fused.items())
        findings.append(_finding("integer nodes", sum(fused.values()), why=text))
    if done.in_float:
        findings.append(
            _finding(
                IN_FLOAT,
                len(done.in_float),
                why="packed on disk, float32 in memory after load: " + ", ".join(done.in_float[:8]),
            )
        )
    return findings


def _half_findings(plan: Plan) -> list[Finding]:
    """Report that float16 on CPU is a storage format: ONNX Runtime computes in float32 there."""
    if plan.dtype != "float16" or plan.device != "cpu":
        return []
    return [_finding("arithmetic", "float32", why="float16 on disk only: the CPU kernels are float32")]
