"""TensorRT 10 and 11 and TensorRT-RTX: engine build from ONNX, inspection of the engine, and its runner.

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

from ..errors import NotUsableError, ResourceError
from ..spec import TensorSpec
from . import trt_library
from .export import output_names

Profile = dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
WORKSPACE_SHARE = 0.5  # of the free memory may serve as scratch while tactics are tried
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

    library: str = trt_library.TENSORRT
    device: str | None = "cuda"
    capabilities: tuple[str, ...] = ()  # "89" and so on; of none given, all that the library covers together
    tf32: bool = False  # float32 products may round their inputs to 10 bits


def build(
    model: Path, profile: Profile, cache: Path, precisions: set[str], options: BuildOptions
) -> tuple[bytes, Counter[str]]:
    """Build the engine; return it serialized, and the number of layers that mention each precision.

    `cache` keeps the timings of tactics between builds. Without a device nothing is counted. Raises `BuilderError`
    with the parser's words and node names, and `NotUsableError` when the engine lacks one of `precisions`: an engine of
    another precision is never delivered.
    """
    trt = trt_library.imported(options.library)
    title = trt_library.TITLES[options.library]
    logger = _logger(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(model)):
        raise BuilderError(f"{title} can't read the model: {_parser_errors(parser)}")
    config = _config(trt, builder, profile, options)
    timings = None
    if options.library == trt_library.TENSORRT:  # TensorRT-RTX times nothing while it builds
        timings = config.create_timing_cache(cache.read_bytes() if cache.exists() else b"")
        config.set_timing_cache(timings, True)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise BuilderError(f"{title} could not build an engine: {logger.last or 'it gave no reason'}")
    if timings is not None:
        _write(cache, bytes(memoryview(timings.serialize())))
    blob = bytes(memoryview(plan))
    if options.device is None:
        return blob, Counter()
    runtime = trt.Runtime(logger)
    found = inspect(runtime.deserialize_cuda_engine(blob), trt)
    if found and (absent := sorted(precisions - found.keys())):
        got = ", ".join(f"{count} layers {name}" for name, count in found.items())
        raise NotUsableError(f"{title} built no layer in {' or '.join(absent)}: {got}")
    return blob, found


def inspect(engine: Any, trt: Any) -> Counter[str]:
    """Count the layers of an engine that mention each precision, in tensors or kernel name."""
    inspector = engine.create_engine_inspector()
    text = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
    return layer_precisions(text)


def layer_precisions(text: str) -> Counter[str]:
    """Count precisions in the inspector's JSON; formats hidden by dynamic shapes count by kernel name."""
    found: Counter[str] = Counter()
    for layer in json.loads(text).get("Layers", ()):
        if not isinstance(layer, dict):
            continue
        tensors = [*layer.get("Inputs", ()), *layer.get("Outputs", ())]
        words = [str(tensor.get("Format/Datatype", "")) for tensor in tensors if isinstance(tensor, dict)]
        words.append(str(layer.get("TacticName", "")))
        line = " ".join(words).lower()
        found.update(name for name, pattern in PRECISIONS.items() if re.search(pattern, line))
    return found


class TrtRunner:
    """Engine as a `Runner`: tensors stay on the device, work goes to torch's current stream."""

    def __init__(
        self,
        blob: bytes,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        device: str,
        library: str = trt_library.TENSORRT,
    ) -> None:
        trt = trt_library.imported(library)
        self.inputs, self.outputs, self.device = inputs, outputs, torch.device(device)
        self._names = output_names(inputs, outputs)
        with torch.cuda.device(self.device):
            self._runtime: Any = trt.Runtime(_logger(trt))
            self._engine: Any = self._runtime.deserialize_cuda_engine(blob)
            if self._engine is None:
                raise NotUsableError(
                    "TensorRT refuses the engine", hint="Optimize the model again on this machine"
                )
            self._context: Any = self._engine.create_execution_context()
            if self._context is None:
                raise ResourceError("out of memory: the engine's scratch space does not fit on the device")
            self._stream = torch.cuda.Stream(self.device)

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run one batch; outputs are new tensors. Raise `NotUsableError` for shapes outside the profile."""
        with torch.cuda.device(self.device):
            given = {spec.name: inputs[spec.name].to(self.device).contiguous() for spec in self.inputs}
            for name, value in given.items():
                self._take(
                    self._context.set_input_shape(name, tuple(value.shape)),
                    f"input {name} {list(value.shape)}",
                )
                self._take(self._context.set_tensor_address(name, value.data_ptr()), f"input {name}")
            if unknown := self._context.infer_shapes():
                raise NotUsableError(f"TensorRT could not infer the shapes of {', '.join(unknown)}")
            results = {
                spec.name: self._output(spec, name)
                for spec, name in zip(self.outputs, self._names, strict=True)
            }
            self._execute([*given.values(), *results.values()])
        return results

    def close(self) -> None:
        self._context = self._engine = self._runtime = None

    def _output(self, spec: TensorSpec, name: str) -> torch.Tensor:
        shape = tuple(self._context.get_tensor_shape(name))
        if min(shape, default=0) < 0:
            raise NotUsableError(
                f"the size of output {spec.name} depends on the data, which TensorRT can't return"
            )
        result = torch.empty(shape, dtype=spec.torch_dtype, device=self.device)
        self._take(self._context.set_tensor_address(name, result.data_ptr()), f"output {spec.name}")
        return result

    def _execute(self, tensors: list[torch.Tensor]) -> None:
        """Execute on the current stream; the default one forces a synchronization, so a side stream replaces it."""
        current = torch.cuda.current_stream(self.device)
        stream = current if current.cuda_stream else self._stream
        stream.wait_stream(current)
        self._take(self._context.execute_async_v3(stream.cuda_stream), "the engine")
        current.wait_stream(stream)
        for tensor in tensors if stream is self._stream else ():
            tensor.record_stream(stream)

    def _take(self, done: bool, what: str) -> None:
        if not done:
            raise NotUsableError(
                f"TensorRT refuses {what}", hint="It may lie outside the sizes the engine was built for"
            )


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
                hint=f"It covers SM {', '.join(trt_library.RTX_CAPABILITIES)}",
            )


def _logger(trt: Any) -> Any:
    """Build a logger that stores TensorRT's last error and drops warnings."""

    class Logger(trt.ILogger):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.last = ""

        def log(self, severity: Any, msg: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.last = msg

    return Logger()


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_bytes(data)
    fresh.replace(path)
