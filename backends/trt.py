"""TensorRT backend (10 and 11), strongly typed: the ONNX graph states precision and quantization.

No steps of language models: its KVCacheUpdate layer keeps each sequence in one run of a fixed length, without pages.
"""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from infer import device as hardware
from infer import paths
from infer.errors import NotUsableError
from infer.graph import storage
from infer.graph.program import Graph
from infer.onnx import calibrate, onnx_source, precision_casts, trt_engine
from infer.onnx import export as exporter
from infer.onnx.decompositions import experts_refused
from infer.onnx.int8_layers import RewriteResult, rewrite
from infer.plan import Plan
from infer.results import Lowered
from infer.spec import Finding

EXECUTES_CODE = True
PORTABLE = False
STEPS = False
ENGINE = Path("compiled") / "engine.plan"
BUILD_INFO = Path("compiled") / "engine.json"
MODEL = Path("compiled") / "model.onnx"
_NEEDS = {"onnx": "onnx", "onnxscript": "onnxscript", "onnx_ir": "onnx-ir"}
_LOW = {"float16": "float16", "bfloat16": "bfloat16"}
BFLOAT16_OPSET = 22  # the first in which convolutions take bfloat16


def missing() -> str | None:
    """Return the reason why TensorRT can't run here: `no CUDA device`, or a missing package; else None."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if find_spec("tensorrt") is None:
        return "TensorRT is not installed (pip install 'infer[gpu]')"
    for module, package in _NEEDS.items():
        if find_spec(module) is None:
            return f"{package} is not installed (pip install 'infer[gpu]')"
    return None


def refuses(graph: Graph, plan: Plan) -> str | None:
    """Refuse other devices, symbolic sizes without bounds, and quantization of an ONNX source."""
    if not plan.device.startswith("cuda"):
        return f"TensorRT runs on CUDA, not on {plan.device}"
    unbounded = {size for spec in graph.inputs for size in spec.shape if isinstance(size, str)} - set(
        graph.sizes
    )
    if unbounded:
        return f"TensorRT needs a smallest and a largest value of {', '.join(sorted(unbounded))}"
    if reason := experts_refused(graph.program):
        return reason
    if graph.onnx is not None and plan.quant != "none":
        return f"an ONNX source takes --quant none here; {plan.quant} needs the PyTorch model"
    return None


def target(device: str) -> dict[str, str]:
    """Return the TensorRT version and GPU that the engine depends on."""
    return build_info(device)


def lower(graph: Graph, plan: Plan, folder: Path) -> Lowered:
    """Write compiled/engine.plan and its build properties; for an ONNX source the model stays beside it."""
    path = folder / MODEL
    done, wanted = write_model(graph, plan, path)
    usual = {"batch": max(plan.batches)} | _sample_sizes(graph)
    profile = trt_engine.profiles(graph.inputs, graph.sizes, usual)
    tied = build_info(plan.device)
    cache = paths.cache("tensorrt") / f"{tied['tensorrt']}-sm{tied['sm']}.timing"
    with torch.cuda.device(plan.device):
        blob, found = trt_engine.build(path, profile, plan.device, cache, wanted)
    (folder / ENGINE).write_bytes(blob)
    (folder / BUILD_INFO).write_text(json.dumps(tied, indent=1, sort_keys=True))
    if graph.onnx is None:
        for name in (path, path.with_name(path.name + ".data")):
            name.unlink(missing_ok=True)
    layers = ", ".join(f"{count} {name}" for name, count in found.most_common())
    findings = [
        Finding("lower", "trt engine", len(blob), "B", f"TensorRT {tied['tensorrt']}, {tied['gpu']}"),
        Finding(
            "lower", "trt layers by precision", sum(found.values()), why=layers or "the engine does not say"
        ),
        *(Finding("lower", f"trt layers as {form}", count) for form, count in sorted(done.forms.items())),
        *_profile_findings(profile),
    ]
    return Lowered(findings)


def open(folder: Path, device: str) -> trt_engine.TrtRunner:
    """Open the engine; raise `NotUsableError` when it was built for another TensorRT version or GPU."""
    made, here = json.loads((folder / BUILD_INFO).read_text()), build_info(device)
    differs = [f"{key} {made.get(key)}, here {here[key]}" for key in here if made.get(key) != here[key]]
    if differs:
        raise NotUsableError(
            f"the engine was built for {'; '.join(differs)}", hint="Lower the graph again on this machine"
        )
    signature = storage.load_signature(folder)
    return trt_engine.TrtRunner((folder / ENGINE).read_bytes(), signature.inputs, signature.outputs, device)


def write_model(graph: Graph, plan: Plan, path: Path) -> tuple[RewriteResult, set[str]]:
    """Write the ONNX file for TensorRT's parser; return the rewritten layers and the required precisions.

    Needs no device.
    """
    import onnx

    done = RewriteResult()
    low = _LOW.get(plan.dtype)
    if graph.onnx is not None:
        import onnx_ir as ir

        model = ir.load(str(graph.onnx))
    else:
        model = exporter.to_ir(graph, "trt", opset=BFLOAT16_OPSET if low == "bfloat16" else exporter.OPSET)
        if calibrate.needs_scales(model):
            calibrate.make_static(model, calibrate.activation_scales(graph))
        done = rewrite(model, "trt")
    if low is not None and onnx_source.is_float32(model):
        precision_casts.lower_precision(model, "float16" if low == "float16" else "bfloat16")
    exporter.save(model, path)
    onnx.checker.check_model(str(path), full_check=True)
    wanted = {low} if low is not None else set()
    return done, wanted | ({"int8"} if any(form.startswith("static int8") for form in done.forms) else set())


def build_info(device: str) -> dict[str, str]:
    """Return the properties that an engine is built for: TensorRT version, compute capability, GPU name."""
    marks = hardware.fingerprint(device)
    return {"tensorrt": _version(), "sm": marks["sm"], "gpu": marks["gpu"]}


def _version() -> str:
    try:
        return version("tensorrt")
    except PackageNotFoundError:
        import tensorrt

        return str(tensorrt.__version__)


def _sample_sizes(graph: Graph) -> dict[str, int]:
    """Return the sample's value of each symbolic size but the batch."""
    sizes: dict[str, int] = {}
    for spec in graph.inputs:
        if spec.name in graph.samples:
            pairs = zip(spec.shape, graph.samples[spec.name].shape, strict=True)
            sizes |= {
                size: int(actual) for size, actual in pairs if isinstance(size, str) and size != "batch"
            }
    return sizes


def _profile_findings(profile: trt_engine.Profile) -> list[Finding]:
    return [
        Finding("lower", f"trt sizes of {name}", "x".join(map(str, middle)), why=f"from {low} to {high}")
        for name, (low, middle, high) in profile.items()
    ]
