"""OpenVINO models: converted from an exported graph, compiled for the CPU, run with named tensors."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from infer.errors import NotUsableError, ResourceError
from infer.onnx.openvino_ports import input_places, output_places
from infer.process import spawn
from infer.spec import TensorSpec

from . import compile_trial
from .layers import LayerConverter
from .library import library

_NOISE = ("Exception from ", "Check ", "[ GENERAL_ERROR ]", "[ NOT_IMPLEMENTED ]")
_SUMMARY = "Summary:"


class NumericSettings(msgspec.Struct, frozen=True):
    """Settings that change numerics: precision, activation group and VNNI; stored beside the model."""

    precision: str = (
        "f32"  # compute dtype of float operators: the plugin's own choice would be bf16 where it is fast
    )
    group: int = 0  # columns of an activation that share an int8 scale; 0: activations stay float
    vnni: bool = False  # the model multiplies int8 by int8, which saturates without VNNI
    decoded: bool = False  # weights become float when the model is opened, not at each call

    def properties(self) -> dict[str, Any]:
        """Return the properties for `compile_model`, with as many threads as torch has now."""
        return {
            "INFERENCE_PRECISION_HINT": self.precision,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": self.group,
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "ENABLE_CPU_PINNING": False,  # several processes would be pinned to the same cores
        }


def read_converted_model(path: Path, layers: LayerConverter) -> Any:
    """Read an ONNX file as an OpenVINO model; nodes of the domain `infer` are converted by `layers`.

    Raises `NotUsableError` naming the operator when there is none for it.
    """
    core = library().Core()
    for extension in layers.extensions():
        core.add_extension(extension)
    try:
        return core.read_model(path)
    except RuntimeError as error:
        raise NotUsableError(
            f"OpenVINO has no form of this model: {clean_error_message(error)}",
            hint="Use --backend ort or inductor",
        ) from error


@cache
def _core_of_process(pid: int) -> Any:
    """Return the `openvino.Core` that compiles, of which a process has one and never drops it; a fork has its own.

    The CPU plugin gives the thread that creates it an alternate signal stack and unmaps it in the thread that drops it.
    In another thread that leaves the first one with a stack that is gone: its next signal, a Ctrl-C, ends the process.
    """
    return library().Core()


def compiled(model: Any, settings: NumericSettings) -> Any:
    """Compile a model, or the file of one; raise `NotUsableError` when the CPU plugin refuses it."""
    core = _core_of_process(os.getpid())
    try:
        if settings.decoded:
            from openvino import passes

            model = core.read_model(model)
            folding = passes.Manager()
            folding.register_pass(passes.ConstantFolding())
            folding.run_passes(model)
        return core.compile_model(model, "CPU", settings.properties())
    except RuntimeError as error:
        raise NotUsableError(f"OpenVINO refuses the model: {clean_error_message(error)}") from error


def require_compilable(path: Path, settings: NumericSettings) -> None:
    """Read and compile the file of a model in a process of its own first: on some graphs OpenVINO ends its process.

    Raises `NotUsableError` then; what it refuses in words is left to those who read and compile it here.
    """
    wanted = json.dumps([os.fspath(path), settings.properties()])
    code = spawn.run(Path(compile_trial.__file__), [wanted]).returncode
    if code < 0:
        raise NotUsableError(
            f"OpenVINO crashes while it reads and compiles this graph ({spawn.describe_exit(code)})",
            hint="Use another --backend",
        )


def count_executed_ops(model: Any) -> Counter[str]:
    """Count the layers of a compiled model by type, constants and ends left out."""
    counts: Counter[str] = Counter()
    for node in model.get_runtime_model().get_ordered_ops():
        counts[str(node.get_rt_info()["layerType"].astype(str))] += 1
    return Counter({name: n for name, n in counts.items() if name not in ("Const", "Input", "Output")})


class OpenvinoRunner:
    """Compiled model as a `Runner`. Each thread has a request of its own, so that several may call it at once."""

    def __init__(
        self,
        model: Any,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        settings: NumericSettings,
    ) -> None:
        self.inputs, self.outputs, self.settings = inputs, outputs, settings
        self._model: Any = compiled(model, settings)
        self._read = input_places(self._model, [spec.name for spec in inputs])
        self._given = output_places(self._model, [spec.name for spec in outputs])
        self._local = threading.local()

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run one batch; raise `ResourceError` when memory runs out."""
        arrays = {name: inputs[name].detach().cpu().contiguous().numpy() for name in self._read}
        return {name: torch.from_numpy(array) for name, array in self.run_arrays(arrays).items()}

    def run_arrays(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run one batch of dense arrays; raise `ResourceError` when memory runs out."""
        request = getattr(self._local, "request", None)
        if request is None:
            request = self._local.request = self._model.create_infer_request()
        feeds = {index: arrays[name] for name, index in self._read.items()}
        try:
            # Shared, an input that an output is made of without a copy is written to at a later call.
            results = request.infer(feeds, share_inputs=False, share_outputs=False)
        except RuntimeError as error:
            if "bad_alloc" in str(error) or "allocate" in str(error):
                raise ResourceError(
                    f"out of memory: {clean_error_message(error)}", hint="Send smaller batches"
                ) from error
            raise
        return {name: results[index] for name, index in self._given.items()}

    def close(self) -> None:
        self._local = threading.local()
        self._model = None


def clean_error_message(error: BaseException) -> str:
    """Strip source paths and conditions from an exception of OpenVINO, which has its message in the last lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    wanted = [line for line in lines if not line.startswith(_NOISE) and line != _SUMMARY]
    return " ".join(wanted or lines)[:400] or type(error).__name__
