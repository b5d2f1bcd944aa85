"""Recovery of Linear, Conv2d and Embedding layers from a captured program, so that they can be quantized.

Only operators whose weight (and bias) are parameters of the program become layers again; the numbers stay the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

aten = torch.ops.aten
LAYERS = (nn.Linear, nn.Conv2d, nn.Embedding)


def restore_layers(module: fx.GraphModule) -> int:
    """Replace `linear`, `conv2d` and `embedding` on parameters by layers, in place; return the count.

    They are operators of an exported program (`aten.linear`), or functions of a graph of dynamo.
    """
    # All are read before the first is placed: a layer in the place of another's parameters hides them.
    calls = [node for node in module.graph.nodes if node.op == "call_function" and node.target in _MAKERS]
    layers = [(node, built) for node in calls if (built := _MAKERS[node.target](module, node)) is not None]
    moved: dict[fx.Node, fx.Node] = {}
    for node, (layer, x, weight) in layers:
        name = _place(module, str(weight.target), layer)
        with module.graph.inserting_before(node):
            call = moved[node] = module.graph.call_module(name, (moved.get(x, x),))
        call.meta = dict(node.meta)
        node.replace_all_uses_with(call)
        module.graph.erase_node(node)
    restored = len(layers)
    if restored:
        for node in reversed(list(module.graph.nodes)):
            if node.op == "get_attr" and not node.users:
                module.graph.erase_node(node)
        module.recompile()
        _drop_unread(module)
    return restored


def _drop_unread(module: fx.GraphModule) -> None:
    """Remove parameters that only a restored layer reads from their old owners, so that no tie keeps them float."""
    read = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    for prefix, owner in module.named_modules():
        if isinstance(owner, LAYERS):
            continue
        for held in (owner._parameters, owner._buffers):
            for name in list(held):
                if (f"{prefix}.{name}" if prefix else name) not in read:
                    del held[name]


def _arguments(node: fx.Node, names: tuple[str, ...], defaults: dict[str, Any]) -> dict[str, Any]:
    return {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}


def _parameter(module: fx.GraphModule, node: Any) -> Tensor | None:
    """Return the parameter or constant that a node reads; None for a computed value."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    value = module
    for part in str(node.target).split("."):
        value = getattr(value, part, None)  # type: ignore[assignment]
    return value if isinstance(value, Tensor) else None


Made = tuple[nn.Module, Any, fx.Node] | None


def _linear(module: fx.GraphModule, node: fx.Node) -> Made:
    arguments = _arguments(node, ("x", "weight", "bias"), {"bias": None})
    weight, bias = _parameter(module, arguments["weight"]), _parameter(module, arguments["bias"])
    if weight is None or weight.dim() != 2 or (bias is None) != (arguments["bias"] is None):
        return None
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    return _with_weights(layer, weight, bias), arguments["x"], arguments["weight"]


def _conv2d(module: fx.GraphModule, node: fx.Node) -> Made:
    defaults = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    arguments = _arguments(node, ("x", "weight", *defaults), defaults)
    weight, bias = _parameter(module, arguments["weight"]), _parameter(module, arguments["bias"])
    if weight is None or (bias is None) != (arguments["bias"] is None):
        return None
    layer = nn.Conv2d(
        weight.shape[1] * arguments["groups"],
        weight.shape[0],
        (weight.shape[2], weight.shape[3]),
        **{name: _pair(arguments[name]) for name in ("stride", "padding", "dilation")},
        groups=arguments["groups"],
        bias=bias is not None,
        device="meta",
    )
    return _with_weights(layer, weight, bias), arguments["x"], arguments["weight"]


def _embedding(module: fx.GraphModule, node: fx.Node) -> Made:
    return _embedding_of(module, node.args[1], node.args[0])


def _functional_embedding(module: fx.GraphModule, node: fx.Node) -> Made:
    arguments = _arguments(node, ("x", "weight", "padding_idx", "max_norm"), {"max_norm": None})
    arguments["x"] = arguments.get("x", node.kwargs.get("input"))
    return (
        None
        if arguments["max_norm"] is not None
        else _embedding_of(module, arguments["x"], arguments["weight"])
    )


def _embedding_of(module: fx.GraphModule, x: Any, read: Any) -> Made:
    weight = _parameter(module, read)
    if weight is None:
        return None
    layer = nn.Embedding(weight.shape[0], weight.shape[1], device="meta")
    return _with_weights(layer, weight, None), x, read


def _with_weights(layer: nn.Module, weight: Tensor, bias: Tensor | None) -> nn.Module:
    layer.weight = _as_parameter(weight)
    if bias is not None:
        layer.bias = _as_parameter(bias)
    return layer.eval()


def _as_parameter(value: Tensor) -> nn.Parameter:
    """Return the tensor itself when it is a parameter, so that ties survive; else wrap it."""
    return value if isinstance(value, nn.Parameter) else nn.Parameter(value.detach(), requires_grad=False)


def _pair(value: Any) -> Any:
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    return values * 2 if len(values) == 1 else values


def _place(module: fx.GraphModule, weight: str, layer: nn.Module) -> str:
    """Register a restored layer at its weight's module, or beside it where that module is still needed."""
    owner, _, attribute = weight.rpartition(".")
    name = owner or "layer"
    read = [str(n.target) for n in module.graph.nodes if n.op == "get_attr"]
    if owner and not _can_replace(
        module.get_submodule(owner), layer, [r for r in read if r.startswith(f"{owner}.")]
    ):
        name = f"{owner}.{attribute.removesuffix('_weight')}_layer"
    while _layer_at(module, name):
        name += "_again"
    module.add_submodule(name, layer)
    return name


def _can_replace(owner: nn.Module, layer: nn.Module, read: list[str]) -> bool:
    """Return true if `layer` can take the place of `owner`, which holds nothing else that the program reads."""
    if owner._modules and not isinstance(owner, LAYERS):
        return False
    return all(_is_shared(owner, layer, name.rpartition(".")[2]) for name in read)


def _is_shared(owner: nn.Module, layer: nn.Module, name: str) -> bool:
    one, other = getattr(owner, name, None), getattr(layer, name, None)
    return isinstance(one, Tensor) and isinstance(other, Tensor) and one.data_ptr() == other.data_ptr()


def _layer_at(module: fx.GraphModule, name: str) -> bool:
    try:
        return isinstance(module.get_submodule(name), LAYERS)
    except AttributeError:
        return False


_MAKERS: dict[Any, Callable[[fx.GraphModule, fx.Node], Made]] = {
    aten.linear.default: _linear,
    aten.conv2d.default: _conv2d,
    aten.embedding.default: _embedding,
    nn.functional.linear: _linear,
    torch.conv2d: _conv2d,
    nn.functional.embedding: _functional_embedding,
}
