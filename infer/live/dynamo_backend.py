"""`torch.compile(model, backend="infer")`: the graphs that dynamo captures, each verified by `infer.compile`.

Forward passes without gradients; graph breaks are as dynamo makes them. A graph that can't be compiled, fails its gate
or gains nothing runs as it is, with one warning; so does one whose weights were written to since.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..errors import GateError, NotUsableError, ResourceError, UsageError
from ..load.sources.modules_from_program import restore_layers
from .compile import compile as compile_model


def infer_backend(graph: fx.GraphModule, examples: Sequence[Any], **given: Any) -> Callable[..., Any]:
    """Compile one graph of dynamo for calls of the examples' sizes, any number of rows, and these weights.

    `given["options"]`: those of `infer.compile`: `torch.compile(model, backend="infer", options={"quant": "nf4"})`.
    """
    if torch.is_grad_enabled():
        _warn("gradients are on: call it under torch.inference_mode() or torch.no_grad()")
        return graph.forward
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    pairs = enumerate(zip(placeholders, examples, strict=True))
    weights = {i: value for i, (node, value) in pairs if _is_weight(node, value)}
    tensors = [i for i, value in enumerate(examples) if isinstance(value, Tensor) and i not in weights]
    if not tensors:
        return graph.forward
    if any(weight.is_inference() for weight in weights.values()):
        _warn("its weights were made under inference_mode, where no change of them can be noticed")
        return graph.forward
    try:
        with torch._guards.tracing(None):
            bound = _bound(graph, examples, weights)
            compiled = compile_model(
                bound, tuple(examples[i] for i in tensors), **(given.get("options") or {})
            )
    except (GateError, NotUsableError, ResourceError, UsageError) as error:
        _warn(str(error))
        return graph.forward
    versions = {i: weight._version for i, weight in weights.items()}

    def run(*args: Any) -> Any:
        if any(args[i] is not weight or weight._version != versions[i] for i, weight in weights.items()):
            _warn("weights were changed after it was compiled")
            return graph.forward(*args)
        return compiled(*(args[i] for i in tensors))

    return run


def _warn(reason: str) -> None:
    warnings.warn(f"torch.compile with infer runs a graph as it is: {reason}", stacklevel=3)


def _is_weight(node: fx.Node, value: Any) -> bool:
    """Return true for a parameter or buffer of a module, which dynamo gives to its graphs as an argument."""
    described = node.meta.get("tensor_dict") or {}
    return isinstance(value, nn.Parameter) or "_dynamo_static_input_type" in described


def _bound(graph: fx.GraphModule, examples: Sequence[Any], weights: dict[int, Tensor]) -> fx.GraphModule:
    """Return the graph with its weights as layers of its own, and its symbolic sizes read off its tensors.

    Raises `NotUsableError` for a number that varies and is no size of a tensor.
    """
    root, copied = nn.Module(), fx.Graph()
    for name, child in graph.named_children():
        root.add_module(name, child)
    values: dict[fx.Node, fx.Node] = {}
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    numbers = [i for i, value in enumerate(examples) if not isinstance(value, Tensor)]
    for i, node in enumerate(placeholders):
        if i not in weights and i not in numbers:
            values[node] = copied.node_copy(node)
    for i, weight in weights.items():
        name = f"weight_{i}"
        if isinstance(weight, nn.Parameter):
            root.register_parameter(name, weight)
        else:
            root.register_buffer(name, weight)
        values[placeholders[i]] = copied.get_attr(name)
    for i in numbers:
        values[placeholders[i]] = _size_node(placeholders[i], values, copied)
    for node in graph.graph.nodes:
        if node.op != "placeholder":
            values[node] = copied.node_copy(node, values.__getitem__)
    bound = fx.GraphModule(root, copied)
    restore_layers(bound)
    return bound.eval()


def _size_node(number: fx.Node, values: dict[fx.Node, fx.Node], graph: fx.Graph) -> fx.Node:
    """Write the call that reads a symbolic size off the tensor that has it."""
    for node, tensor in values.items():
        shape = getattr(node.meta.get("example_value"), "shape", ())
        for axis, size in enumerate(shape):
            if node.op == "placeholder" and str(size) == str(number.meta.get("example_value")):
                return graph.call_method("size", (tensor, axis))
    raise NotUsableError(f"argument {number.name} of the graph is a number that varies")
