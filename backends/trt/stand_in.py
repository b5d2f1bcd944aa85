"""Engines built ahead of time, without their GPU: ONNX Runtime computes what the builder was given, in float32.

So quantization, calibrated scales and rewritten layers are judged where the engine is built; the rounding of 16-bit
numbers and the kernels are judged when the engine is first opened on its GPU, by the artifact's self-test.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from infer.onnx.export import save
from infer.spec import TensorSpec

if TYPE_CHECKING:
    import onnx_ir as ir

MODEL = Path("stand_in") / "model.onnx"  # beside compiled/, so that it is not published


def write_float32_model(model: Path, folder: Path) -> None:
    """Write the float32 form of the ONNX file that an engine was built from into `folder`."""
    import onnx_ir as ir

    loaded = ir.load(str(model))
    to_float32(loaded)
    save(loaded, folder / MODEL)


def to_float32(model: ir.Model) -> None:
    """Make every float16 and bfloat16 value of a graph float32, in place; codes of weights stay."""
    import onnx_ir as ir

    low, full = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16), ir.DataType.FLOAT
    for name, value in list(model.graph.initializers.items()):
        if value.dtype in low and value.const_value is not None:
            value.const_value = ir.tensor(value.const_value.numpy().astype("float32"), name=name)
            value.dtype = full
    for value in (*model.graph.inputs, *(out for node in model.graph for out in node.outputs)):
        if value.dtype in low:
            value.dtype = full
    for node in model.graph:
        for key in ("to", "dtype"):
            if key in node.attributes and node.attributes[key].as_int() in map(int, low):
                node.attributes[key] = ir.AttrInt64(key, int(full))
        stored = node.attributes.get("value")
        if stored is not None and stored.type == ir.AttributeType.TENSOR and stored.as_tensor().dtype in low:
            array = stored.as_tensor().numpy().astype("float32")
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(array))


class OrtStandIn:
    """ONNX Runtime on the CPU in place of an engine whose GPU is absent: float32, unfused, outputs in their dtypes."""

    def __init__(self, folder: Path, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> None:
        from infer.onnx.ort_session import EXACT, OrtRunner

        self.inputs, self.outputs = inputs, outputs
        self._runner = OrtRunner(folder / MODEL, inputs, outputs, "cpu", settings=EXACT)

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run one batch in float32."""
        wide = {
            name: value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
            for name, value in inputs.items()
        }
        outputs = self._runner.run(wide)
        return {spec.name: outputs[spec.name].to(spec.torch_dtype) for spec in self.outputs}

    def close(self) -> None:
        self._runner.close()
