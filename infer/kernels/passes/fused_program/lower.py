"""Lowering of graph nodes to operations of a fused program, where they are float32 rows on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from .encode import Operation
from .match import is_call
from .values import BATCH, COLUMNS, HEADS, ROW, TEAM, TOKENS, Value, View, Views, outside

aten, own = torch.ops.aten, torch.ops.infer
_LUT, _FINE_LUT = 0, 4
_LINEAR = {
    "linear_lut4_packed": _LUT,
    "linear_int8_packed": 1,
    "linear_int8_weight_packed": 2,
    "linear_int8_balanced_packed": 3,
}
_ACTIVATIONS = {
    aten.silu.default: 0,
    aten.relu.default: 3,
    aten.sigmoid.default: 4,
    aten.tanh.default: 5,
}


class Reader:
    """Views of a program's nodes. `flat`: its rows are the tokens of a language model's step."""

    def __init__(self, *, flat: bool) -> None:
        self.views = Views()
        self.values: set[Value] = set()  # of the chain that is being made
        self._flat = flat
        self._outside: dict[fx.Node, View] = {}

    def in_program(self, node: fx.Node) -> bool:
        view = self.views.known.get(node)
        return view is not None and view.value in self.values

    def operation(self, node: Any) -> Operation | None:
        """Return the operation that `node` is, or None."""
        tensor = node.meta.get("val")
        if (
            not isinstance(tensor, torch.Tensor)
            or tensor.dtype != torch.float32
            or tensor.device.type != "cpu"
        ):
            return None
        name = getattr(getattr(node.target, "_schema", None), "name", "").rpartition("::")[2]
        if name in _LINEAR:
            return self._linear(node, _LINEAR[name])
        if name == "attend_native":
            return self._attend(node)
        rule = _RULES.get(node.target)
        return rule(self, node) if rule is not None else None

    def _view(self, node: Any) -> View | None:
        if not isinstance(node, fx.Node):
            return None
        if node in self.views.known:
            return self.views.known[node]
        if node not in self._outside:
            view = outside(node, flat=self._flat)
            if view is None:
                return None
            same = self._outside.get(view.value.node)
            self._outside[node] = self._outside[view.value.node] = same or view
        return self._outside[node]

    def _rows(self, node: Any) -> View | None:
        view = self._view(node)
        return view if view is not None and view.is_rows() else None

    def _vector(self, node: Any, width: int) -> bool:
        """Return a float32 weight of so many numbers, or None."""
        if node is None:
            return True
        if not isinstance(node, fx.Node) or node.op != "placeholder":
            return False
        value = node.meta["val"]
        return value.dtype == torch.float32 and tuple(value.shape) == (width,)

    def _made(self, node: fx.Node, like: View, kind: int = ROW, width: int = 0) -> View:
        """Return the dense result of an operation, its axes as those of `like`."""
        value = Value(node, like.value.domain, width or like.columns, kind, lead=like.value.lead)
        if width or like.heads == 1:
            return View(value, like.axes, width or like.width)
        return View(value, like.axes, like.width, 0, like.heads, like.width)

    def _linear(self, node: Any, kind: int) -> Operation | None:
        x = self._rows(node.args[0])
        sizes = [a for a in node.args if isinstance(a, int)]
        if x is None:
            return None
        operands = [a for a in node.args[1:] if not isinstance(a, int)]
        bias = operands.pop()
        weights = [*operands, *[None] * (4 - len(operands))]
        if kind == _LUT:
            codes, scale = (operand.meta["val"] for operand in operands[:2])
            kind = _LUT if scale.shape[1] == codes.shape[1] else _FINE_LUT
        made = self._made(node, x, TEAM, sizes[0])
        made.value.direct = True
        return Operation("linear", [x], made, [kind, sizes[0], x.width], [*weights, bias])

    def _rms_norm(self, node: Any) -> Operation | None:
        source, weight, offset, eps = node.args
        x = self._view(source)
        if x is None or x.axes[-1] != COLUMNS or not self._vector(weight, x.width):
            return None
        return Operation("rms_norm", [x], self._made(node, x), [], [weight], [offset, eps])

    def _layer_norm(self, node: Any) -> Operation | None:
        source, shape, *rest = node.args
        weight, bias, eps = _rest(node, rest, weight=None, bias=None, eps=1e-5)
        x = self._rows(source)
        if (
            x is None
            or shape != [x.width]
            or not self._vector(weight, x.width)
            or not self._vector(bias, x.width)
        ):
            return None
        return Operation("layer_norm", [x], self._made(node, x), [], [weight, bias], [eps])

    def _activation(self, node: Any) -> Operation | None:
        x = self._rows(node.args[0])
        if x is None:
            return None
        kind = _ACTIVATIONS.get(node.target)
        if kind is None:
            kind = 1 if node.kwargs.get("approximate") == "tanh" else 2
        return Operation("activate", [x], self._made(node, x), [kind])

    def _binary(self, node: Any) -> Operation | None:
        if node.kwargs or len(node.args) != 2:
            return None
        a, b = node.args
        if isinstance(a, (int, float)):
            a, b = b, a
        if isinstance(b, (int, float)):
            x = self._rows(a) if is_call(node, aten.mul.Tensor) else None
            return None if x is None else Operation("scale", [x], self._made(node, x), [], [], [float(b)])
        x, y = self._rows(a), self._rows(b)
        if x is None or y is None or (x.value.domain, x.width) != (y.value.domain, y.width):
            return None
        if len(x.axes) < len(y.axes):
            x, y = y, x
        if not (self.in_program(x.value.node) or self.in_program(y.value.node)):
            return None  # a chain starts with a norm or a linear layer
        return Operation("add" if is_call(node, aten.add.Tensor) else "multiply", [x, y], self._made(node, x))

    def _rotate(self, node: Any) -> Operation | None:
        x, cos, sin = self._view(node.args[0]), self._rows(node.args[1]), self._rows(node.args[2])
        if x is None or cos is None or sin is None or x.axes[-1] != COLUMNS or HEADS not in x.axes:
            return None
        if len({x.value.domain, cos.value.domain, sin.value.domain}) > 1 or cos.width % 2:
            return None
        # Positions are given for every head: their axis of heads has one.
        return Operation("rotate", [x, cos, sin], self._made(node, x), [cos.width])

    def _pick(self, node: Any) -> Operation | None:
        source, index = node.args
        x = self._rows(source)
        if (
            x is None
            or not self._flat
            or not isinstance(index, (list, tuple))
            or len(index) != len(x.axes) - 1
        ):
            return None
        *before, rows = index
        if (
            any(i is not None for i in before)
            or not isinstance(rows, fx.Node)
            or not self.in_program(x.value.node)
        ):
            return None
        value = rows.meta["val"]
        if value.dtype != torch.int64 or value.dim() != 1:
            return None
        made = Value(node, str(value.shape[0]), x.width)
        return Operation("gather", [x], View(made, x.axes, x.width), read=[rows])

    def _attend(self, node: Any) -> Operation | None:
        query, key, value = views = [self._view(n) for n in node.args[:3]]
        read = list(node.args[4:8])
        sinks, layer, page, dtype, scale, window, softcap, *more = node.args[8:]
        if any(argument is not None and argument != 0 for argument in more):
            return None  # ALiBi or chunks: the operator by itself
        if query is None or key is None or value is None or not self.in_program(query.value.node):
            return None
        if any(view is None or view.axes != (TOKENS, HEADS, COLUMNS) for view in views):
            return None
        sizes = [query.heads, key.heads, query.width, layer, window, page, dtype]
        result = self._made(node, replace(query, stride=query.width), TEAM)
        return Operation("attend", [query, key, value], result, sizes, [sinks], [scale, softcap], read)

    def _attend_all(self, node: Any) -> Operation | None:
        views = [self._view(n) for n in node.args[:3]]
        mask, dropout, causal = _rest(node, node.args[3:], attn_mask=None, dropout_p=0.0, is_causal=False)
        query, key, value = views
        if query is None or key is None or value is None or dropout or not self.in_program(query.value.node):
            return None
        if any(v.axes != (BATCH, HEADS, TOKENS, COLUMNS) for v in (query, key, value)):
            return None
        if (
            len({v.value.domain for v in (query, key, value)}) > 1
            or len({v.width for v in (query, key, value)}) > 1
        ):
            return None
        grouped = query.heads != key.heads
        if (
            grouped
            and (not node.kwargs.get("enable_gqa") or query.heads % key.heads)
            or key.heads != value.heads
        ):
            return None
        read: list[fx.Node] = []
        seen = [0, 0, 0]
        if mask is not None:
            found = _mask(mask, query.value.domain.split(","))
            if found is None:
                return None
            read, seen = [found[0]], found[1]
        scale = node.kwargs.get("scale")
        numbers = [query.width**-0.5 if scale is None else float(scale)]
        sizes = [query.heads, key.heads, query.width, *seen, int(causal)]
        result = self._made(node, replace(query, stride=query.width), TEAM)
        return Operation("attend_all", [query, key, value], result, sizes, [], numbers, read)


def _rest(node: Any, given: Sequence[Any], **defaults: Any) -> list[Any]:
    """Arguments in their order, whether they were given by place, by name or not at all."""
    names = list(defaults)
    return [given[i] if i < len(given) else node.kwargs.get(n, defaults[n]) for i, n in enumerate(names)]


def _mask(node: Any, lead: list[str]) -> tuple[fx.Node, list[int]] | None:
    """Return a mask of all heads before it is expanded, and if it is float, has batches and has rows."""
    while is_call(node, aten.expand.default):
        node = node.args[0]
    tensor = node.meta["val"]
    batch, head, row, column = (str(size) for size in tensor.shape) if tensor.dim() == 4 else ("",) * 4
    if head != "1" or column != lead[1] or batch not in ("1", lead[0]) or row not in ("1", lead[1]):
        return None
    if tensor.dtype not in (torch.bool, torch.float32) or tensor.device.type != "cpu":
        return None
    return node, [int(tensor.dtype == torch.float32), int(batch != "1"), int(row != "1")]


_RULES: dict[Any, Any] = {
    own.rms_norm.default: Reader._rms_norm,
    aten.layer_norm.default: Reader._layer_norm,
    aten.gelu.default: Reader._activation,
    **dict.fromkeys(_ACTIVATIONS, Reader._activation),
    aten.add.Tensor: Reader._binary,
    aten.mul.Tensor: Reader._binary,
    own.rotate.default: Reader._rotate,
    aten.index.Tensor: Reader._pick,
    aten.scaled_dot_product_attention.default: Reader._attend_all,
}
