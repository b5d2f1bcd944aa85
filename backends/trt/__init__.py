"""TensorRT backend (10, 11 and RTX), strongly typed: the ONNX graph states precision and quantization.

`trt` takes TensorRT where it is installed, else TensorRT-RTX; `trt:rtx` takes TensorRT-RTX; `trt:sm_89` builds with
TensorRT-RTX for GPUs of compute capability 8.9 on a machine without one.

No steps of language models: its KVCacheUpdate layer keeps each sequence in one run of a fixed length, without pages.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import torch

from infer import device as hardware
from infer.distribution import install
from infer.errors import NotUsableError
from infer.graph import storage
from infer.graph.program import Graph, OnnxGraph, OpenvinoGraph
from infer.onnx import decompositions, packages
from infer.plan import Plan
from infer.results import Lowered
from infer.spec import Finding

from . import builder, libraries, lowering, runner, stand_in

EXECUTES_CODE = True
PORTABLE = False
STEPS = False
CODES = False
ENGINE = Path("compiled") / "engine.plan"
BUILD_INFO = Path("compiled") / "engine.json"
MODEL = Path("compiled") / "model.onnx"


@dataclass(frozen=True)
class TrtBackend:
    """The backend on one library: `option` "" takes the one that is installed, "rtx" and "sm_NN" TensorRT-RTX."""

    option: str = ""
    EXECUTES_CODE: bool = True
    PORTABLE: bool = False
    STEPS: bool = False
    CODES: bool = False
    INSTEAD: ClassVar = {"int8": ("int8:static", "TensorRT computes int8 only with calibrated scales")}

    @property
    def library(self) -> str:
        return libraries.select_library(self.option)

    @property
    def capability(self) -> str:
        """Compute capability to build for ahead of time ("89"), or ""."""
        return libraries.capability(self.option)

    @property
    def AHEAD_OF_TIME(self) -> str:  # noqa: N802 - a constant of the contract
        if not self.capability:
            return ""
        return (
            f"built for {self._group()} without a GPU: compared as ONNX Runtime computes the same graph in float32; "
            "the first opening on such a GPU compares the engine itself"
        )

    def missing(self) -> str | None:
        """Return the reason why TensorRT can't run here: `no CUDA device`, or a missing package; else None."""
        if not self.capability and not torch.cuda.is_available():
            ahead = ", but trt:sm_89 builds for one ahead of time"
            return f"no CUDA device{ahead if libraries.module_name(libraries.RTX) else ''}"
        if reason := libraries.missing(self.library):
            return reason
        if reason := packages.missing("gpu"):
            return reason
        if self.capability and find_spec("onnxruntime") is None:
            return (
                f"onnxruntime is not installed, which compares what is built ahead of time ({install('ort')})"
            )
        return None

    def refuses(self, graph: Graph, plan: Plan) -> str | None:
        """Refuse other devices, symbolic sizes without bounds, and quantization of an ONNX source."""
        if not plan.device.startswith("cuda") and not self.capability:
            return f"TensorRT runs on CUDA, not on {plan.device}"
        unbounded = {size for spec in graph.inputs for size in spec.shape if isinstance(size, str)} - set(
            graph.sizes
        )
        if unbounded:
            return f"TensorRT needs a smallest and a largest value of {', '.join(sorted(unbounded))}"
        if self.capability and not plan.device.startswith("cuda"):
            reason = libraries.lacking([self.capability], plan.quant, plan.dtype)
        else:
            reason = _uncovered(plan, self.library) if torch.cuda.is_available() else None
        if reason:
            return reason
        if reason := decompositions.refused(graph.nodes):
            return reason
        if isinstance(graph, OpenvinoGraph):
            return graph.no_program
        if isinstance(graph, OnnxGraph) and plan.quant != "none":
            return f"an ONNX source takes --quant none here; {plan.quant} needs the PyTorch model"
        return None

    def target(self, device: str) -> dict[str, str]:
        """Return the library's version and the GPU that the engine depends on."""
        if self.capability and not device.startswith("cuda"):
            group = " ".join(libraries.rtx_group(self.capability))
            return {self.library: libraries.library_version(self.library), "sm": group}
        return build_info(device, self.library)

    def lower(self, graph: Graph, plan: Plan, folder: Path) -> Lowered:
        """Write compiled/engine.plan and its build properties; for an ONNX source the model stays beside it."""
        path, library = folder / MODEL, self.library
        tied, on_gpu = self.target(plan.device), plan.device.startswith("cuda")
        sms = tuple(tied["sm"].split()) if library == libraries.RTX else ()
        device = plan.device if on_gpu else None
        options = builder.BuildOptions(library, device, sms, plan.dtype == "tf32")
        with torch.cuda.device(device) if device else contextlib.nullcontext():
            built = lowering.build(graph, plan, path, options)
        if device is None:
            stand_in.write_float32_model(path, folder)
        (folder / ENGINE).write_bytes(built.engine.blob)
        (folder / BUILD_INFO).write_text(json.dumps(tied, indent=1, sort_keys=True))
        if not isinstance(graph, OnnxGraph):
            for name in (path, path.with_name(path.name + ".data")):
                name.unlink(missing_ok=True)
        named = f"{libraries.TITLES[library]} {tied[library]}, {tied.get('gpu', 'SM ' + tied['sm'])}"
        return Lowered(_findings(built, named))

    def unopenable(self) -> str | None:
        """Return the reason why an artifact of this backend can't be opened here, or None."""
        if reason := self.missing():
            return reason
        if self.capability and not torch.cuda.is_available():
            return (
                f"its engine was built ahead of time for {self._group()}, and this machine has no CUDA device"
            )
        return None

    def open(self, folder: Path, device: str) -> runner.TrtRunner | stand_in.OrtStandIn:
        """Open the engine; raise `NotUsableError` when it was built for another library, version or GPU.

        On the CPU what `lower` wrote ahead of time is opened as a stand-in, in the folder where it was lowered alone.
        """
        if not device.startswith("cuda"):
            if not (folder / stand_in.MODEL).exists():
                raise NotUsableError("a TensorRT engine runs on a GPU, not on the CPU")
            signature = storage.load_signature(folder)
            return stand_in.OrtStandIn(folder, signature.inputs, signature.outputs)
        stored = json.loads((folder / BUILD_INFO).read_text())
        library = libraries.RTX if libraries.RTX in stored else libraries.TENSORRT
        if reason := libraries.missing(library):
            raise NotUsableError(f"the engine was built by {libraries.TITLES[library]}: {reason}")
        here = build_info(device, library)
        differs = [
            f"{key} {stored.get(key)}, here {here[key]}" for key in here if stored.get(key) != here[key]
        ]
        if differs:
            raise NotUsableError(
                f"the engine was built for {'; '.join(differs)}", hint="Lower the graph again on this machine"
            )
        signature = storage.load_signature(folder)
        blob = (folder / ENGINE).read_bytes()
        return runner.TrtRunner(blob, signature.inputs, signature.outputs, device, library)

    def _group(self) -> str:
        group = libraries.rtx_group(self.capability)
        return f"compute capability {', '.join(f'{int(sm) / 10:g}' for sm in group)}"


def variant(option: str) -> TrtBackend:
    """Return the backend of `trt:OPTION`; raise `UsageError` for an unknown option."""
    libraries.select_library(option)
    return TrtBackend(option)


INSTEAD, doctor = TrtBackend.INSTEAD, libraries.findings
_default = TrtBackend()
missing, refuses, target, lower, open = (
    _default.missing,
    _default.refuses,
    _default.target,
    _default.lower,
    _default.open,
)


def build_info(device: str, library: str = libraries.TENSORRT) -> dict[str, str]:
    """Return the properties that an engine is built for: version and GPU, of TensorRT-RTX the covered capabilities."""
    marks, version = hardware.fingerprint(device), libraries.library_version(library)
    if library == libraries.RTX:
        return {library: version, "sm": " ".join(libraries.rtx_group(marks["sm"]))}
    return {library: version, "sm": marks["sm"], "gpu": marks["gpu"]}


def _uncovered(plan: Plan, library: str) -> str | None:
    """Return the reason why TensorRT-RTX has no engines for this GPU in the plan's format, or None."""
    sm = hardware.fingerprint(plan.device)["sm"]
    if library != libraries.RTX:
        return None
    if sm in libraries.RTX_CAPABILITIES:
        return libraries.lacking([sm], plan.quant, plan.dtype)
    covered = ", ".join(libraries.RTX_CAPABILITIES)
    return f"TensorRT-RTX builds for SM {covered}, this GPU is SM {sm}: use TensorRT or --backend inductor"


def _findings(built: lowering.Built, named: str) -> list[Finding]:
    """Return the report's rows of an engine built by `named`: bytes, precisions, forms, and its profile."""
    engine, forms = built.engine, sorted(built.rewritten.forms.items())
    layers = ", ".join(f"{count} {name}" for name, count in engine.layers.most_common())
    sizes = {"trt weights": engine.weight_bytes, "trt scratch memory": engine.scratch_bytes}
    rows = [
        Finding("lower", "trt engine", len(engine.blob), "B", named),
        *(Finding("lower", what, size, "B") for what, size in sizes.items() if size is not None),
        Finding(
            "lower",
            "trt layers by precision",
            sum(engine.layers.values()),
            why=layers or "the engine does not say",
        ),
        *(Finding("lower", f"trt layers as {form}", count) for form, count in forms),
    ]
    if built.unpacked:
        rows.append(Finding("lower", "trt packed weights", "decoded", why=built.unpacked))
    for name, (low, middle, high) in built.profile.items():
        why = f"from {low} to {high}"
        rows.append(Finding("lower", f"trt sizes of {name}", "x".join(map(str, middle)), why=why))
    return rows
