"""Activation scales from real inputs, for targets that need them before run time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import NotUsableError
from ..graph.program import Graph
from .graph_builder import GraphBuilder

if TYPE_CHECKING:
    import onnx_ir as ir

ROWS = 32
_DYNAMIC = {"linear_int8": "linear_int8_static", "conv2d_int8": "conv2d_int8_static"}


def needs_scales(model: ir.Model) -> bool:
    """Return true if int8 layers of the model expect to compute their activation scales at run time."""
    return any(node.domain == "infer" and node.op_type in _DYNAMIC for node in model.graph)


def activation_scales(graph: Graph) -> dict[str, float]:
    """Measure absmax / 127 of each dynamic int8 layer's input over the samples, by name of its codes.

    Raises `NotUsableError` when the graph came without samples.
    """
    program = graph.program
    if program is None or not graph.samples:
        raise NotUsableError(
            "int8 needs real inputs to calibrate, and none are at hand",
            hint="Optimize the model on this machine again, with --data or --quant int8:static",
        )
    stored = {**program.state_dict, **program.constants}
    names = {value.data_ptr(): name for name, value in stored.items() if isinstance(value, torch.Tensor)}
    watch = _RangeObserver(names)
    inputs = {name: value[:ROWS] for name, value in graph.samples.items()}
    with torch.no_grad(), watch:
        graph.callable()(**inputs)
    return {name: max(largest, 1e-30) / 127 for name, largest in watch.largest.items()}


def make_static(model: ir.Model, scales: Mapping[str, float]) -> None:
    """Turn dynamic int8 layers into static ones with these scales, in place."""
    import onnx_ir as ir

    for node in list(model.graph):
        if node.domain != "infer" or node.op_type not in _DYNAMIC:
            continue
        emit = GraphBuilder(model.graph, node)
        step = scales.get(emit.weight_name)
        if step is None:
            raise NotUsableError(
                "no calibration input reached this layer, so its static scale is not known",
                where=emit.weight_name,
                hint="Give inputs that use it with --data, or pin it: --layer NAME=float",
            )
        name = f"{emit.prefix}/x_scale"
        given = list(node.inputs)
        given.insert(3, emit.constant(name, np.array(step, np.float32)))
        output = ir.val(f"{emit.prefix}/static")
        replaced = _DYNAMIC[node.op_type]
        emit.nodes.append(
            ir.node(
                replaced, given, dict(node.attributes), domain="infer", outputs=[output], name=f"{name}/layer"
            )
        )
        emit.replace(output)


class _RangeObserver(TorchDispatchMode):
    """Interpreter that records the largest magnitude entering each dynamic int8 layer."""

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
