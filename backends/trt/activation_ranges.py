"""Activation scales from real inputs, for targets that need them before run time: int8 and float8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from infer import rows
from infer.errors import NotUsableError
from infer.graph.program import Graph, TorchGraph
from infer.kernels.ops.linear_fp8 import LARGEST
from infer.onnx.rewrite import GraphBuilder

if TYPE_CHECKING:
    import onnx_ir as ir

ROWS = 32
# A layer that computes its activation scale at run time → the static one, and the largest code of its type.
_DYNAMIC = {
    "linear_int8": ("linear_int8_static", 127.0),
    "conv2d_int8": ("conv2d_int8_static", 127.0),
    "linear_fp8": ("linear_fp8_static", LARGEST),
}


def needs_scales(model: ir.Model) -> bool:
    """Return true if quantized layers of the model expect to compute their activation scales at run time."""
    return any(node.domain == "infer" and node.op_type in _DYNAMIC for node in model.graph)


def input_ranges(graph: Graph) -> dict[str, float]:
    """Measure the largest magnitude of each dynamic layer's input over the samples, by name of its codes.

    Raises `NotUsableError` when the graph came without samples.
    """
    if not isinstance(graph, TorchGraph) or not graph.samples:
        raise NotUsableError(
            "int8 and fp8 layers: TensorRT needs real inputs to calibrate, and none are at hand",
            hint="Optimize the model on this machine again, with --data",
        )
    stored = {**graph.program.state_dict, **graph.program.constants}
    names = {value.data_ptr(): name for name, value in stored.items() if isinstance(value, torch.Tensor)}
    watch = _RangeObserver(names)
    inputs = rows.cut(graph.inputs, graph.samples, 0, ROWS)
    with torch.no_grad(), watch:
        graph.callable()(**inputs)
    return watch.largest


def make_static(model: ir.Model, ranges: Mapping[str, float]) -> None:
    """Turn dynamic layers into static ones for these largest magnitudes, in place."""
    import onnx_ir as ir

    for node in list(model.graph):
        if node.domain != "infer" or node.op_type not in _DYNAMIC:
            continue
        emit = GraphBuilder(model.graph, node)
        largest = ranges.get(emit.weight_name)
        if largest is None:
            raise NotUsableError(
                "no calibration input reached this layer, so its static scale is not known",
                where=emit.weight_name,
                hint="Give inputs that use it with --data, or pin it: --layer NAME=float",
            )
        replaced, top = _DYNAMIC[node.op_type]
        step = max(largest, 1e-30) / top
        name = f"{emit.prefix}/x_scale"
        operands = list(node.inputs)
        operands.insert(3, emit.constant(name, np.array(step, np.float32)))
        output = ir.val(f"{emit.prefix}/static")
        emit.nodes.append(
            ir.node(
                replaced,
                operands,
                dict(node.attributes),
                domain="infer",
                outputs=[output],
                name=f"{name}/layer",
            )
        )
        emit.replace(output)


class _RangeObserver(TorchDispatchMode):
    """Interpreter that records the largest magnitude entering each dynamic layer."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.names, self.largest = names, dict[str, float]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "infer" and func._opname in _DYNAMIC:
            name = self.names[args[1].data_ptr()]
            largest = args[0].abs().amax().item()
            self.largest[name] = max(largest, self.largest.get(name, 0.0))
        return func(*args, **(kwargs or {}))
