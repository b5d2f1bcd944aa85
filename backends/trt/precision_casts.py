"""Precision lowering: float32 graph to float16 or bfloat16 inside, float32 at inputs and outputs.

TensorRT 11 takes precision from the graph alone, so the casts stand in the graph. What sums many terms or leaves
the range of float16 (normalizations, reductions, exponentials) stays float32, and what ONNX wants in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from infer.errors import NotUsableError
from infer.onnx.rewrite import drop_unused

if TYPE_CHECKING:
    import onnx_ir as ir

LARGEST_HALF = 65504.0
_NORMS = {"LayerNormalization", "GroupNormalization", "InstanceNormalization", "RMSNormalization"}
_SUMS = {
    "ReduceSum",
    "ReduceMean",
    "ReduceL1",
    "ReduceL2",
    "ReduceProd",
    "ReduceSumSquare",
    "CumSum",
    "Einsum",
}
_EXPONENTIALS = {"Softmax", "LogSoftmax", "Exp", "Log", "Pow", "ReduceLogSum", "ReduceLogSumExp"}
_TYPED = {"Resize", "Range", "TopK", "NonMaxSuppression", "DynamicQuantizeLinear", "Cast", "CastLike"}
_TYPED |= {"LpNormalization", "RandomNormalLike", "RandomUniformLike"}
KEEP = frozenset(_NORMS | _SUMS | _EXPONENTIALS | _TYPED)


def is_float32(model: ir.Model) -> bool:
    """Return true if no stored float tensor has lower precision."""
    import onnx_ir as ir

    low = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    return not any(value.dtype in low for value in model.graph.initializers.values())


def lower_precision(model: ir.Model, dtype: Literal["float16", "bfloat16"]) -> int:
    """Rewrite `model` in place; return the number of nodes that now compute in `dtype`.

    Raises `NotUsableError` for graphs with control flow, whose bodies are not followed.
    """
    import onnx_ir as ir
    from onnx_ir.passes.common import ShapeInferencePass

    low = ir.DataType.FLOAT16 if dtype == "float16" else ir.DataType.BFLOAT16
    bodies = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    for node in model.graph:
        if any(attribute.type in bodies for attribute in node.attributes.values()):
            raise NotUsableError(
                f"the body of {node.op_type} can't be lowered to {dtype}", where=str(node.name)
            )
    ShapeInferencePass()(model)
    work = _Casts(model.graph, low)
    work.inputs()
    count = sum(work.node(node) for node in list(model.graph))
    work.outputs()
    drop_unused(model.graph)
    return count


class _Casts:
    """State of one graph's conversion: `lowered` holds the values that are `low` now and were float32."""

    def __init__(self, graph: ir.Graph, low: ir.DataType) -> None:
        import onnx_ir as ir

        self.graph, self.low, self.full = graph, low, ir.DataType.FLOAT
        self.halves: dict[str, Any] = {}
        self.casts: dict[tuple[int, int], Any] = {}
        self.lowered: set[int] = set()
        self.origin: dict[int, Any] = {}  # a value made low by a cast → the float32 value it came from

    def inputs(self) -> None:
        for value in self.graph.inputs:
            if value.dtype == self.full and value.uses():
                users = list(value.uses())
                cast = self._cast(value, self.low, before=None)
                for user, index in users:
                    user.replace_input_with(index, cast)

    def node(self, node: ir.Node) -> bool:
        """Convert one node; return true if it now computes in low precision."""
        if node.op_type in KEEP or node.domain not in ("", "ai.onnx"):
            return self._keep(node)
        touched = False
        for index, value in enumerate(node.inputs):
            if value is not None and value.const_value is not None and value.dtype == self.full:
                node.replace_input_with(index, self._half(value))
                touched = True
            elif value is not None and id(value) in self.lowered:
                touched = True
        if node.op_type in ("Constant", "ConstantOfShape"):
            touched = self._constant(node)
        floats = [output for output in node.outputs if touched and output.dtype == self.full]
        for output in floats:
            output.dtype = self.low
            self.lowered.add(id(output))
        return bool(floats)

    def outputs(self) -> None:
        import onnx_ir as ir

        for index, value in enumerate(self.graph.outputs):
            if id(value) not in self.lowered:
                continue
            name, node = str(value.name), value.producer()
            value.name = f"{name}/low"
            output = ir.val(name, self.full, value.shape)
            cast = ir.node("Cast", [value], {"to": int(self.full)}, outputs=[output], name=f"{name}/cast")
            self.graph.insert_after(node, cast) if node is not None else self.graph.append(cast)
            self.graph.outputs[index] = output

    def _keep(self, node: ir.Node) -> bool:
        """Keep a node in float32 between casts from and to low precision."""
        for index, value in enumerate(node.inputs):
            if value is not None and id(value) in self.lowered:
                node.replace_input_with(index, self._cast(value, self.full, before=node))
        for output in node.outputs:
            if output.dtype == self.full and not output.is_graph_output():
                users = list(output.uses())
                cast = self._cast(output, self.low, before=None, after=node)
                for user, index in users:
                    user.replace_input_with(index, cast)
        return False

    def _cast(
        self, value: ir.Value, to: ir.DataType, *, before: ir.Node | None, after: ir.Node | None = None
    ) -> ir.Value:
        import onnx_ir as ir

        if to == self.full and id(value) in self.origin:
            return self.origin[id(value)]
        key = (id(value), int(to))
        if key in self.casts:
            return self.casts[key]
        name = f"{value.name}/{'full' if to == self.full else 'low'}"
        output = ir.val(name, to, value.shape)
        cast = ir.node("Cast", [value], {"to": int(to)}, outputs=[output], name=name)
        if before is not None:
            self.graph.insert_before(before, cast)
        elif after is not None:
            self.graph.insert_after(after, cast)
        else:
            self.graph.insert_before(self.graph[0], cast)
        if to == self.low:
            self.lowered.add(id(output))
            self.origin[id(output)] = value
        self.casts[key] = output
        return output

    def _half(self, value: ir.Value) -> ir.Value:
        """Return the initializer in low precision, shared by its users; clipped to float16's range."""
        import onnx_ir as ir

        name = f"{value.name}/low"
        if name not in self.halves:
            array = _narrow(value.const_value.numpy(), self.low)  # type: ignore[union-attr]
            tensor = ir.tensor(array, dtype=self.low, name=name)
            half = ir.val(name, self.low, list(array.shape), const_value=tensor)
            self.graph.register_initializer(half)
            self.halves[name] = half
            self.lowered.add(id(half))
        return self.halves[name]

    def _constant(self, node: ir.Node) -> bool:
        import onnx_ir as ir

        attribute = node.attributes.get("value")
        if attribute is None or attribute.as_tensor().dtype != self.full:
            return False
        tensor = ir.tensor(_narrow(attribute.as_tensor().numpy(), self.low), dtype=self.low)
        node.attributes["value"] = ir.AttrTensor("value", tensor)
        return True


def _narrow(array: np.ndarray, low: ir.DataType) -> np.ndarray:
    if low.name == "FLOAT16":
        return array.clip(-LARGEST_HALF, LARGEST_HALF).astype(np.float16)
    return array.astype(low.numpy())
