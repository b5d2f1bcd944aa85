"""Complete models in int8 by ONNX Runtime and OpenVINO, made as their documentation recommends for a CPU.

Each `make_*` writes into a folder and may take minutes; each `open_*` gives a function from named tensors to the
first output. Both engines use as many threads as torch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from infer import device as hardware
from infer.distribution import install
from infer.library_errors import quiet

Inputs = Mapping[str, Tensor]
Call = Callable[[Inputs], Tensor]


def missing(engine: str) -> str | None:
    """Return the reason why ORT or OpenVINO cannot be measured, or None."""
    modules = {"ORT": ("onnx", "onnxruntime"), "OpenVINO": ("openvino", "nncf")}[engine]
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"{absent[0]} is not installed ({install('bench')})" if absent else None


def make_onnx(module: nn.Module, inputs: Inputs, sizes: Mapping[str, Mapping[int, str]], path: Path) -> None:
    """Export the float model by torch's older exporter, whose graphs the fusions of ONNX Runtime recognise."""
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            tuple(inputs.values()),
            str(path),
            input_names=list(inputs),
            output_names=["output"],
            opset_version=17,
            dynamo=False,
            dynamic_axes={name: dict(axes) for name, axes in sizes.items()},
        )


def make_ort_dynamic(path: Path, heads: int, width: int) -> Path:
    """Fuse by onnxruntime.transformers, then `quantize_dynamic`: signed weights with VNNI, unsigned without."""
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers import optimizer

    fused, small = path.with_name("fused.onnx"), path.with_name("ort-int8.onnx")
    with _silent():
        model = optimizer.optimize_model(
            str(path), model_type="bert", num_heads=heads, hidden_size=width, opt_level=0
        )
        model.save_model_to_file(str(fused))
        kind = QuantType.QInt8 if hardware.has_vnni() else QuantType.QUInt8
        quantize_dynamic(fused, small, weight_type=kind, extra_options={"DefaultTensorType": 1})
    return small


def make_ort_static(path: Path, batches: Sequence[Inputs]) -> Path:
    """Run `quant_pre_process` and `quantize_static` to QDQ: a scale per channel, activations by minimum and maximum."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self._left = iter(batches)

        def get_next(self) -> dict[str, np.ndarray] | None:
            batch = next(self._left, None)
            return None if batch is None else {name: value.numpy() for name, value in batch.items()}

    ready, small = path.with_name("ready.onnx"), path.with_name("ort-int8.onnx")
    with _silent():
        quant_pre_process(str(path), str(ready))
        quantize_static(
            ready,
            small,
            Reader(),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            weight_type=QuantType.QInt8,
            activation_type=QuantType.QUInt8,
            reduce_range=not hardware.has_vnni(),
        )
    return small


def open_ort(path: Path) -> Call:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    wanted = {value.name for value in session.get_inputs()}

    def call(inputs: Inputs) -> Tensor:
        feeds = {name: value.numpy() for name, value in inputs.items() if name in wanted}
        return torch.from_numpy(session.run(None, feeds)[0])

    return call


def make_openvino(path: Path, batches: Sequence[Inputs], *, is_transformer: bool) -> Path:
    """Run `nncf.quantize`: static int8, calibrated; for transformers with NNCF's own rules for them."""
    import nncf
    import openvino

    with _silent():
        model = openvino.Core().read_model(str(path))
        data = nncf.Dataset([{name: value.numpy() for name, value in batch.items()} for batch in batches])
        kind = nncf.ModelType.TRANSFORMER if is_transformer else None
        small = nncf.quantize(model, data, model_type=kind, subset_size=len(batches))
        target = path.with_name("openvino-int8.xml")
        openvino.save_model(small, str(target))
    return target


def open_openvino(path: Path) -> Call:
    import openvino

    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    request: Any = openvino.Core().compile_model(str(path), "CPU", settings).create_infer_request()

    def call(inputs: Inputs) -> Tensor:
        feeds = {name: value.numpy() for name, value in inputs.items()}
        return torch.from_numpy(request.infer(feeds, share_inputs=True)[0])

    return call


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Hold back progress bars and advice of the rivals' tools."""
    os.environ.setdefault("NNCF_CI", "1")  # it would send telemetry
    with quiet(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
