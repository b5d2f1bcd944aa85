"""An ONNX file whose float constants are rounded elsewhere: what that changes in its answers, no engine decides.

A graph of 8-bit codes steps inside: a sum that differs in its last bit is another code, and some layers later another
answer, though no input is anywhere near an edge. A norm of what is constant divides rounding by its own size.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

ROUNDING = 1e-6  # relative: some roundings of float32
BY_HAND = 256  # values that are all multiples of one part of so many are written by hand: scales of shapes, exponents
RESIZES = ("Resize", "Upsample")  # whose further inputs are scales
GRIDS = ("QuantizeLinear", "DequantizeLinear")  # whose second input is the step of the codes


def write_rounded(source: Path, path: Path, seed: int) -> None:
    """Write a copy of a file in which every float32 constant differs by up to `ROUNDING` of itself.

    The steps of codes stay as they are: between two grids of related steps a value may lie on an edge by design, and
    which code it gets there is no matter of rounding. So do constants that nobody rounded: by a scale of 1.999999 an
    image has another size, and a power of 2.000001 of a negative number is none.
    """
    model, generator = onnx.load(str(source)), np.random.default_rng(seed)
    kept = {node.input[1] for node in model.graph.node if node.op_type in GRIDS}
    kept |= {name for node in model.graph.node if node.op_type in RESIZES for name in node.input[1:] if name}
    constants = [
        attribute.t
        for node in model.graph.node
        if node.op_type == "Constant" and node.output[0] not in kept
        for attribute in node.attribute
    ]
    for tensor in (*model.graph.initializer, *constants):
        if tensor.data_type == onnx.TensorProto.FLOAT and tensor.name not in kept:
            values = numpy_helper.to_array(tensor).astype(np.float64)
            if (values * BY_HAND == np.rint(values * BY_HAND)).all():
                continue
            moved = values * (1 + ROUNDING * generator.uniform(-1, 1, values.shape))
            tensor.CopyFrom(numpy_helper.from_array(moved.astype(np.float32), tensor.name))
    large = model.ByteSize() > onnx.checker.MAXIMUM_PROTOBUF // 2
    onnx.save(model, str(path), save_as_external_data=large)
