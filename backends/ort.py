"""ONNX Runtime: the program exported to ONNX, int8 layers written for the instructions at hand."""

from __future__ import annotations

import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import torch

from infer import capture
from infer import device as hardware
from infer.capture import Graph
from infer.onnx import export as exporter
from infer.onnx import session, signs, source
from infer.onnx.int8 import Rewritten
from infer.onnx.operands import Target
from infer.spec import Finding, Plan

EXECUTES_CODE = False
PORTABLE = True
MODEL = Path("compiled") / "model.onnx"
_NEEDS = {"onnx": "onnx", "onnxruntime": "onnxruntime", "onnxscript": "onnxscript", "onnx_ir": "onnx-ir"}
_FUSED = ("DynamicQuantizeMatMul", "MatMulIntegerToFloat", "MatMulNBits", "QLinearConv", "MatMulInteger")


def missing() -> str | None:
    """The first package that is absent, with the command that brings it."""
    for module, package in _NEEDS.items():
        if find_spec(module) is None:
            return f"{package} is not installed (pip install 'infer[ort]')"
    return None


def refuses(graph: Graph, plan: Plan) -> str | None:
    """bfloat16 on CPU, a CUDA device without CUDA kernels, and quantizers that an ONNX source can't take."""
    if plan.device.startswith("cuda"):
        import onnxruntime

        if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            return "this onnxruntime has no CUDA (pip install 'infer[gpu]')"
        if plan.quant_name == "int8" and plan.quant_option != "weight":
            return "ONNX Runtime multiplies int8 activations on CPU only; use --backend trt or inductor"
    elif plan.dtype == "bfloat16" or _uses(graph, torch.bfloat16):
        return "ONNX Runtime has no bfloat16 kernels for CPU; use --dtype fp32"
    elif not plan.device.startswith("cpu"):
        return f"ONNX Runtime does not run on {plan.device} here"
    if graph.onnx is None:
        return None
    if plan.quant not in ("none", "int8"):
        return f"an ONNX source takes --quant int8 or none, not {plan.quant}: its layers are already lowered"
    if plan.dtype not in ("float32", "auto"):
        return f"an ONNX source keeps its own dtype; --dtype {plan.dtype} needs the PyTorch model"
    return None


def target(device: str) -> dict[str, str]:
    """Nothing: the ONNX file runs anywhere, int8 weights change their signs when it is opened."""
    return {}


def lower(graph: Graph, plan: Plan, folder: Path) -> list[Finding]:
    """Write compiled/model.onnx and its data; the findings say what ONNX Runtime made of it."""
    path = folder / MODEL
    target = _form(plan.device)
    if graph.onnx is None:
        done = exporter.export(graph, target, path).rewritten
    elif plan.quant == "int8":
        done = source.quantize(graph.onnx, path, target)
    else:
        source.copy(graph.onnx, path)
        done = Rewritten()
    is_dynamic = any(isinstance(size, str) for spec in graph.inputs for size in spec.shape)
    start = time.perf_counter()
    nodes = session.running_nodes(path, plan.device, is_dynamic=is_dynamic)
    seconds = time.perf_counter() - start
    return [
        _found("opset", source.opset(path)),
        _found("model", exporter.folder_bytes(path), "B"),
        _found("nodes", nodes.total(), why="after ONNX Runtime's fusions"),
        _found("session opened in", seconds, "s", "graph optimizations, and decoding of packed weights"),
        *_half_findings(plan),
        *_int8_findings(done, nodes, target),
        *_packed_findings(graph),
    ]


def open(folder: Path, device: str) -> session.OrtRunner:
    """Open compiled/model.onnx on `device`, named and typed by the artifact's signature."""
    signature = capture.load_signature(folder)
    path = signs.adapted(folder / MODEL, _form(device))
    return session.OrtRunner(path, signature.inputs, signature.outputs, device)


def _form(device: str) -> Target:
    return "ort-u8s8" if device.startswith("cuda") or hardware.has_vnni() else "ort-u8u8"


def _found(what: str, value: float | str, unit: str = "", why: str = "") -> Finding:
    return Finding("lower", f"ort {what}", value, unit, why)


def _uses(graph: Graph, dtype: torch.dtype) -> bool:
    if graph.program is None:
        return False
    state = (*graph.program.state_dict.values(), *graph.program.constants.values())
    return any(isinstance(value, torch.Tensor) and value.dtype == dtype for value in state)


def _int8_findings(done: Rewritten, nodes: Counter[str], target: Target) -> list[Finding]:
    """Which form each layer took and why, and whether the weights stay packed in memory."""
    why = {
        "ort-u8u8": "weights unsigned: without VNNI, signed ones saturate",
        "ort-u8s8": "weights signed: this machine multiplies them without saturating",
        "trt": "",
    }[target]
    found = [_found(f"layers as {form}", count, why=why) for form, count in sorted(done.forms.items())]
    fused = {op: nodes[op] for op in _FUSED if nodes[op]}
    if done.forms and fused:
        text = ", ".join(f"{count} {op}" for op, count in fused.items())
        found.append(_found("int8 nodes", sum(fused.values()), why=text))
    if done.in_float:
        found.append(
            _found(
                "layers in float",
                len(done.in_float),
                why="packed on disk, float32 in memory after load: " + ", ".join(done.in_float[:8]),
            )
        )
    return found


def _half_findings(plan: Plan) -> list[Finding]:
    """What float16 means on a CPU: ONNX Runtime has hardly a kernel for it there and widens everything."""
    if plan.dtype != "float16" or plan.device != "cpu":
        return []
    return [_found("arithmetic", "float32", why="float16 on disk only: the CPU kernels are float32")]


def _packed_findings(graph: Graph) -> list[Finding]:
    """4-bit layers have no operator here: they are decoded when the session is created."""
    if graph.program is None:
        return []
    called = [str(n.target) for n in graph.program.graph.nodes if n.op == "call_function"]
    count = sum("infer.linear_lut" in name for name in called)
    if not count:
        return []
    why = "packed on disk, float32 in memory after load: ONNX Runtime can't compute with the codes"
    return [_found("layers decoded at load", count, why=why)]
