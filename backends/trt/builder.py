"""TensorRT 10 and 11 and TensorRT-RTX: engine build from ONNX, and inspection of the engine.

All are used alike: strong typing (always on in 11), precision from the ONNX graph alone, no calibrator.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infer.errors import NotUsableError
from infer.spec import TensorSpec

from . import libraries

Profile = dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
WORKSPACE_SHARE = 0.5  # of the free memory may serve as scratch while tactics are tried
_SIZE = re.compile(r"(Total \w+ Memory): (\d+) bytes")
PRECISIONS = {
    "float32": r"float32|\bfloat\b|\bfp32\b|f32f32",
    "float16": r"\bhalf\b|\bfp16\b|\bfloat16|\bf16f16|_f16f16",
    "bfloat16": r"\bbf16\b|bfloat16|bf16bf16",
    "fp8": r"\bfp8\b|e4m3",
    "int8": r"\bint8\b|i8i8|_i8_|imma",
}


def profiles(
    inputs: tuple[TensorSpec, ...], sizes: Mapping[str, tuple[int, int]], usual: Mapping[str, int]
) -> Profile:
    """Return smallest, usual and largest shape of each input; `usual` is clamped to the bounds."""

    def shapes(spec: TensorSpec) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        low = tuple(sizes[size][0] if isinstance(size, str) else size for size in spec.shape)
        high = tuple(sizes[size][1] if isinstance(size, str) else size for size in spec.shape)
        wish = tuple(usual.get(size, 1) if isinstance(size, str) else size for size in spec.shape)
        middle = tuple(min(max(w, a), b) for w, a, b in zip(wish, low, high, strict=True))
        return low, middle, high

    return {spec.name: shapes(spec) for spec in inputs if any(isinstance(size, str) for size in spec.shape)}


class BuilderError(NotUsableError):
    """A model that TensorRT's parser or builder refuses; the message holds its words."""


@dataclass(frozen=True)
class BuildOptions:
    """Choices of one build. `device` None builds ahead of time, for `capabilities`, which only TensorRT-RTX can."""

    library: str = libraries.TENSORRT
    device: str | None = "cuda"
    capabilities: tuple[str, ...] = ()  # "89" and so on; of none given, all that the library covers together
    tf32: bool = False  # float32 products may round their inputs to 10 bits


@dataclass(frozen=True)
class SerializedEngine:
    """A serialized engine. `layers` counts those that mention each precision; bytes are the builder's own words."""

    blob: bytes
    layers: Counter[str]
    weight_bytes: int | None = None
    scratch_bytes: int | None = None  # at the largest shapes of the profile


def build(
    model: Path, profile: Profile, cache: Path, precisions: set[str], options: BuildOptions
) -> SerializedEngine:
    """Build the engine of an ONNX file.

    `cache` keeps the timings of tactics between builds. Without a device no layers are counted. Raises `BuilderError`
    with the parser's words and node names, and `NotUsableError` when the engine lacks one of `precisions`: an engine of
    another precision is never delivered.
    """
    trt = libraries.imported(options.library)
    title = libraries.TITLES[options.library]
    logger = build_logger(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(model)):
        raise BuilderError(f"{title} can't read the model: {_parser_errors(parser)}")
    config = _config(trt, builder, profile, options)
    timings = None
    if options.library == libraries.TENSORRT:  # TensorRT-RTX times nothing while it builds
        timings = config.create_timing_cache(cache.read_bytes() if cache.exists() else b"")
        config.set_timing_cache(timings, True)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise BuilderError(f"{title} could not build an engine: {logger.last or 'it gave no reason'}")
    if timings is not None:
        _write(cache, bytes(memoryview(timings.serialize())))
    blob = bytes(memoryview(plan))
    sizes = logger.sizes.get("Total Weights Memory"), logger.sizes.get("Total Activation Memory")
    if options.device is None:
        return SerializedEngine(blob, Counter(), *sizes)
    runtime = trt.Runtime(logger)
    compiled = inspect(runtime.deserialize_cuda_engine(blob), trt)
    if compiled and (absent := sorted(precisions - compiled.keys())):
        got = ", ".join(f"{count} layers {name}" for name, count in compiled.items())
        raise NotUsableError(f"{title} built no layer in {' or '.join(absent)}: {got}")
    return SerializedEngine(blob, compiled, *sizes)


def inspect(engine: Any, trt: Any) -> Counter[str]:
    """Count the layers of an engine that mention each precision, in tensors or kernel name."""
    inspector = engine.create_engine_inspector()
    text = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
    return layer_precisions(text)


def layer_precisions(text: str) -> Counter[str]:
    """Count precisions in the inspector's JSON; formats hidden by dynamic shapes count by kernel name."""
    counts: Counter[str] = Counter()
    for layer in json.loads(text).get("Layers", ()):
        if not isinstance(layer, dict):
            continue
        tensors = [*layer.get("Inputs", ()), *layer.get("Outputs", ())]
        words = [str(tensor.get("Format/Datatype", "")) for tensor in tensors if isinstance(tensor, dict)]
        words.append(str(layer.get("TacticName", "")))
        line = " ".join(words).lower()
        counts.update(name for name, pattern in PRECISIONS.items() if re.search(pattern, line))
    return counts


def _config(trt: Any, builder: Any, profile: Profile, options: BuildOptions) -> Any:
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if not options.tf32:
        config.clear_flag(trt.BuilderFlag.TF32)
    if options.device is not None:
        free, _ = torch.cuda.mem_get_info(torch.device(options.device))
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, int(free * WORKSPACE_SHARE))
    if options.capabilities:
        _set_capabilities(trt, config, options.capabilities)
    if profile:
        shapes = builder.create_optimization_profile()
        for name, (low, middle, high) in profile.items():
            shapes.set_shape(name, low, middle, high)
        if config.add_optimization_profile(shapes) < 0:
            raise NotUsableError(f"TensorRT refuses the range of input sizes {profile}")
    return config


def _parser_errors(parser: Any) -> str:
    """Format every parser error as `node (operator): message`."""
    errors = [parser.get_error(index) for index in range(parser.num_errors)]
    lines = [
        f"{error.node_name() or 'the model'} ({error.node_operator()}): {error.desc()}" for error in errors
    ]
    return "; ".join(lines[:5]) or "it gave no reason"


def _set_capabilities(trt: Any, config: Any, capabilities: tuple[str, ...]) -> None:
    """Build for these compute capabilities; raise `NotUsableError` for one that the library does not cover."""
    config.num_compute_capabilities = len(capabilities)
    for index, name in enumerate(capabilities):
        known = getattr(trt.ComputeCapability, f"SM{name}", None)
        if known is None or not config.set_compute_capability(known, index):
            raise NotUsableError(
                f"TensorRT-RTX does not build for compute capability {int(name) / 10:g}",
                hint=f"It covers SM {', '.join(libraries.RTX_CAPABILITIES)}",
            )


def build_logger(trt: Any) -> Any:
    """Build a logger that stores TensorRT's last error and the sizes in bytes that it states, and drops the rest."""

    class Logger(trt.ILogger):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.last = ""
            self.sizes: dict[str, int] = {}

        def log(self, severity: Any, msg: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.last = msg
            elif stated := _SIZE.fullmatch(msg):
                self.sizes[stated[1]] = int(stated[2])

    return Logger()


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_bytes(data)
    fresh.replace(path)
