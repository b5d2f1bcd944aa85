"""Lowering of graph nodes to operations of a fused program, where they are float32 rows on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .graph_reader import GraphReader, arguments
from .lower_attention import attend, attend_all, rotate
from .match import is_call
from .operations import Operation
from .values import COLUMNS, TEAM, Value, View

aten, own = torch.ops.aten, torch.ops.infer
_LUT, _FINE_LUT, _GROUPWISE = 0, 4, 1 << 56
_LINEAR = {
    "linear_lut4_packed": _LUT,
    "linear_int8_packed": 1,
    "linear_int8_weight_packed": 2,
    "linear_int8_balanced_packed": 3,
    "linear_groupwise_packed": _GROUPWISE,
}
_ACTIVATIONS = {
    aten.silu.default: 0,
    aten.relu.default: 3,
    aten.sigmoid.default: 4,
    aten.tanh.default: 5,
}


def lower_node(reader: GraphReader, node: Any) -> Operation | None:
    """Return the operation that `node` is, or None."""
    tensor = node.meta.get("val")
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32 or tensor.device.type != "cpu":
        return None
    name = getattr(getattr(node.target, "_schema", None), "name", "").rpartition("::")[2]
    if name in _LINEAR:
        return _linear(reader, node, _LINEAR[name])
    if name == "attend_native":
        return attend(reader, node)
    rule = _RULES.get(node.target)
    return rule(reader, node) if rule is not None else None


def _linear(reader: GraphReader, node: Any, kind: int) -> Operation | None:
    x = reader.rows(node.args[0])
    sizes = [a for a in node.args if isinstance(a, int)]
    if x is None:
        return None
    operands = [a for a in node.args[1:] if not isinstance(a, int)]
    bias = operands.pop()
    weights = [*operands, *[None] * (4 - len(operands))]
    if kind == _LUT:
        codes, scale = (operand.meta["val"] for operand in operands[:2])
        kind = _LUT if scale.shape[1] == codes.shape[1] else _FINE_LUT
    if kind == _GROUPWISE:
        layout, *sizes = sizes
        kind += layout
    made = reader.result(node, x, TEAM, sizes[0])
    made.value.direct = True
    return Operation("linear", [x], made, [kind, sizes[0], x.width], [*weights, bias])


def _rms_norm(reader: GraphReader, node: Any) -> Operation | None:
    source, weight, offset, eps = node.args
    x = reader.view(source)
    if x is None or x.axes[-1] != COLUMNS or not reader.is_weight(weight, x.width):
        return None
    return Operation("rms_norm", [x], reader.result(node, x), [], [weight], [offset, eps])


def _layer_norm(reader: GraphReader, node: Any) -> Operation | None:
    source, shape, *rest = node.args
    weight, bias, eps = arguments(node, rest, weight=None, bias=None, eps=1e-5)
    x = reader.rows(source)
    if (
        x is None
        or shape != [x.width]
        or not reader.is_weight(weight, x.width)
        or not reader.is_weight(bias, x.width)
    ):
        return None
    return Operation("layer_norm", [x], reader.result(node, x), [], [weight, bias], [eps])


def _activation(reader: GraphReader, node: Any) -> Operation | None:
    x = reader.rows(node.args[0])
    if x is None:
        return None
    kind = _ACTIVATIONS.get(node.target)
    if kind is None:
        kind = 1 if node.kwargs.get("approximate") == "tanh" else 2
    return Operation("activate", [x], reader.result(node, x), [kind])


def _binary(reader: GraphReader, node: Any) -> Operation | None:
    if node.kwargs or len(node.args) != 2:
        return None
    a, b = node.args
    if isinstance(a, (int, float)):
        a, b = b, a
    if isinstance(b, (int, float)):
        x = reader.rows(a) if is_call(node, aten.mul.Tensor) else None
        return None if x is None else Operation("scale", [x], reader.result(node, x), [], [], [float(b)])
    x, y = reader.rows(a), reader.rows(b)
    if x is None or y is None or (x.value.domain, x.width) != (y.value.domain, y.width):
        return None
    if len(x.axes) < len(y.axes):
        x, y = y, x
    if not (reader.in_program(x.value.node) or reader.in_program(y.value.node)):
        return None  # a chain starts with a norm or a linear layer
    return Operation("add" if is_call(node, aten.add.Tensor) else "multiply", [x, y], reader.result(node, x))


def _pick(reader: GraphReader, node: Any) -> Operation | None:
    source, index = node.args
    x = reader.rows(source)
    if x is None or not reader.flat or not isinstance(index, (list, tuple)) or len(index) != len(x.axes) - 1:
        return None
    *before, rows = index
    if (
        any(i is not None for i in before)
        or not isinstance(rows, fx.Node)
        or not reader.in_program(x.value.node)
    ):
        return None
    value = rows.meta["val"]
    if value.dtype != torch.int64 or value.dim() != 1:
        return None
    made = Value(node, str(value.shape[0]), x.width)
    return Operation("gather", [x], View(made, x.axes, x.width), read=[rows])


_RULES: dict[Any, Any] = {
    own.rms_norm.default: _rms_norm,
    aten.layer_norm.default: _layer_norm,
    aten.gelu.default: _activation,
    **dict.fromkeys(_ACTIVATIONS, _activation),
    aten.add.Tensor: _binary,
    aten.mul.Tensor: _binary,
    own.rotate.default: rotate,
    aten.index.Tensor: _pick,
    aten.scaled_dot_product_attention.default: attend_all,
}
