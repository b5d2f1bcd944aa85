"""Rewriting of onnx_ir graphs: nodes of the domain `infer` become operators of the library that reads the model.

The rules of a backend write them through a `GraphBuilder`, which inserts nodes before one node and constants as
initializers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import NotUsableError

if TYPE_CHECKING:
    import onnx_ir as ir

    # Writes one node; returns its output, and the form in which the layer computes, "" of a node that is no layer.
    Rule = Callable[["GraphBuilder"], tuple[ir.Value, str]]
    Rewriter = Callable[[ir.Model], "RewriteResult"]

DOMAIN = "infer"
SLICE_BY_INPUTS = 10  # the first opset of a Slice whose bounds are inputs


class GraphBuilder:
    """Builder of the nodes that replace `node`; names derive from its output."""

    def __init__(self, graph: ir.Graph, node: ir.Node) -> None:
        self.graph, self.node = graph, node
        self.prefix = str(node.outputs[0].name)
        self.opset = int(graph.opset_imports.get("", 0))
        self.nodes: list[ir.Node] = []
        weight = node.inputs[1] if len(node.inputs) > 1 else None
        self.weight_name = str(weight.name) if weight is not None else self.prefix

    def __call__(
        self, op: str, *inputs: ir.Value | None, num_outputs: int = 1, domain: str = "", **attributes: Any
    ) -> Any:
        """Append one operator; return its output, or a tuple of several.

        Absent last inputs are left out: a Conv with an empty bias is not given ONNX Runtime's blocked layout.
        """
        import onnx_ir as ir

        while inputs and inputs[-1] is None:
            inputs = inputs[:-1]
        name = f"{self.prefix}/{op}_{len(self.nodes)}"
        outputs = [ir.val(f"{name}:{index}" if index else name) for index in range(num_outputs)]
        self.nodes.append(
            ir.node(op, list(inputs), attributes or None, domain=domain, outputs=outputs, name=name)
        )
        if domain:
            self.graph.opset_imports.setdefault(domain, 1)
        return outputs[0] if num_outputs == 1 else tuple(outputs)

    def constant(self, name: str, array: np.ndarray) -> ir.Value:
        """Return the initializer of that name, registered when new."""
        import onnx_ir as ir

        if name in self.graph.initializers:
            return self.graph.initializers[name]
        tensor = ir.tensor(array, name=name)
        value = ir.val(name, tensor.dtype, list(array.shape), const_value=tensor)
        self.graph.register_initializer(value)
        return value

    def first(self, x: ir.Value, count: int, axis: int) -> ir.Value:
        """Cut `x` to its first values along an axis."""
        cut: dict[str, Any] = {"starts": [0], "ends": [count], "axes": [axis]}
        if self.opset < SLICE_BY_INPUTS:
            return self("Slice", x, **cut)  # type: ignore[no-any-return]
        given = [self.constant(f"const/int64/{v}", np.array(v, np.int64)) for v in cut.values()]
        return self("Slice", x, *given)  # type: ignore[no-any-return]

    def scalar(self, value: float, dtype: Any = np.float32) -> ir.Value:
        """Return a 0-dimensional constant, shared across the graph by dtype and value."""
        array = np.array(value, dtype)
        return self.constant(f"const/{array.dtype}/{array.item()!r}", array)

    def replace(self, output: ir.Value) -> None:
        """Insert the collected nodes in the node's place; `output` takes over its name, users and type."""
        import onnx_ir as ir

        old = self.node.outputs[0]
        output.type, output.shape = old.type, old.shape
        ir.convenience.replace_nodes_and_values(
            self.graph, self.node, [self.node], self.nodes, [old], [output]
        )


def data(value: ir.Value | None, node: ir.Node) -> np.ndarray:
    """Return the values of an initializer; raise `NotUsableError` naming the node when it is computed."""
    if value is None or value.const_value is None:
        raise NotUsableError(
            f"weights of {node.op_type} are computed by the program, not stored", where=str(node.name)
        )
    return value.const_value.numpy()


def drop_unused(graph: ir.Graph) -> None:
    """Remove initializers without readers (outputs and subgraphs count as readers)."""
    outputs = set(map(id, graph.outputs))
    for name, value in list(graph.initializers.items()):
        if not value.uses() and id(value) not in outputs:
            del graph.initializers[name]


@dataclass
class RewriteResult:
    """Number of layers by written form, and names of the weights left in float."""

    forms: Counter[str] = field(default_factory=Counter)
    in_float: list[str] = field(default_factory=list)


def rewrite(model: ir.Model, rules: Mapping[str, Rule]) -> RewriteResult:
    """Rewrite every node of the domain `infer` by the rule of its operator, in place; other nodes stay."""
    done = RewriteResult()
    for node in list(model.graph):
        if node.domain != DOMAIN:
            continue
        if node.op_type not in rules:
            raise NotUsableError(
                f"infer::{node.op_type} has no ONNX form",
                where=str(node.name),
                hint="Use --backend inductor or eager",
            )
        emit = GraphBuilder(model.graph, node)
        output, form = rules[node.op_type](emit)
        emit.replace(output)
        if form:
            done.forms[form] += 1
        if "in float" in form:
            done.in_float.append(emit.weight_name)
    drop_unused(model.graph)
    model.opset_imports.pop(DOMAIN, None)
    return done
