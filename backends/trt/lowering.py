"""From a graph to an engine: the ONNX file for TensorRT's parser, quantized layers in it, and the build."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from infer import device as hardware
from infer import paths
from infer.graph.program import Graph, OnnxGraph
from infer.onnx import export as exporter
from infer.onnx.layers.operands import Weights
from infer.onnx.rewrite import RewriteResult
from infer.plan import Plan

from . import activation_ranges, builder, layers, libraries, precision_casts

OPSET = 21  # the first with 4-bit codes and blocks in DequantizeLinear
BFLOAT16_OPSET = 22  # the first in which convolutions take bfloat16
LOW = ("float16", "bfloat16")
_PRECISIONS = {
    "static int8": "int8",
    "float8": "fp8",
}  # beginning of a layer's form → what the engine must hold


@dataclass(frozen=True)
class Built:
    """One engine, its profile, and the form of each quantized layer."""

    engine: builder.SerializedEngine
    profile: builder.Profile
    rewritten: RewriteResult
    unpacked: str = ""  # the library's reason against packed weights, which then were decoded


def build(graph: Graph, plan: Plan, path: Path, options: builder.BuildOptions) -> Built:
    """Write `path` and build the engine; packed weights that the library can't read are decoded and reported.

    Raises `BuilderError` when the library refuses the model in both forms.
    """
    profile = profile_of(graph, plan)
    cache = _timing_cache(options)
    done, wanted = write_model(graph, plan, path)
    try:
        return Built(builder.build(path, profile, cache, wanted, options), profile, done)
    except builder.BuilderError as error:
        if not any("packed" in form for form in done.forms):
            raise
        refused = error
    done, wanted = write_model(graph, plan, path, weights="float")
    engine = builder.build(path, profile, cache, wanted, options)
    return Built(engine, profile, done, unpacked=refused.message)


def write_model(
    graph: Graph, plan: Plan, path: Path, *, weights: Weights = "blocks"
) -> tuple[RewriteResult, set[str]]:
    """Write the ONNX file for TensorRT's parser; return the rewritten layers and the required precisions.

    With `weights` "float", weights that only stay packed are decoded. Needs no device.
    """
    import onnx

    done = RewriteResult()
    low = plan.dtype if plan.dtype in LOW else None
    if isinstance(graph, OnnxGraph):
        import onnx_ir as ir

        model = ir.load(str(graph.path))
    else:
        model = exporter.to_ir(graph, layers.PARSER, opset=BFLOAT16_OPSET if low == "bfloat16" else OPSET)
        if activation_ranges.needs_scales(model):
            activation_ranges.make_static(model, activation_ranges.input_ranges(graph))
        done = layers.rewriter(weights)(model)
    if low is not None and precision_casts.is_float32(model):
        precision_casts.lower_precision(model, "float16" if low == "float16" else "bfloat16")
    exporter.save(model, path)
    onnx.checker.check_model(str(path), full_check=True)
    precisions = {p for form in done.forms for begin, p in _PRECISIONS.items() if form.startswith(begin)}
    return done, precisions | ({low} if low is not None else set())


def profile_of(graph: Graph, plan: Plan) -> builder.Profile:
    """Return the smallest, usual and largest shape of each input: the plan's largest batch, the samples' sizes."""
    return builder.profiles(graph.inputs, graph.sizes, {"batch": max(plan.batches)} | _sample_sizes(graph))


def _timing_cache(options: builder.BuildOptions) -> Path:
    here = "any" if options.device is None else hardware.fingerprint(options.device)["sm"]
    target = "-".join(options.capabilities) or here
    name = f"{options.library}-{libraries.library_version(options.library)}-sm{target}"
    return paths.cache("tensorrt") / f"{name}.timing"


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
