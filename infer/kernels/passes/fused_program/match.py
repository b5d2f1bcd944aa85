"""Norms, rotary positions and activations that transformers writes as many small operators → one operator each.

The shapes of the patterns are those of its modelling code; whatever is not found stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from ...ops import fused_program  # noqa: F401 - the operators that are put in
from ..graph_pass import Rewriter

aten, own = torch.ops.aten, torch.ops.infer
_SAME: set[Any] = {
    aten.to.dtype,
    aten.to.device,
    aten._to_copy.default,
    aten.contiguous.default,
    aten.dropout.default,
}
_SAME |= {
    aten.detach.default,
    aten.alias.default,
    aten.to.dtype_layout,
    aten.clone.default,
    aten.type_as.default,
}
ENDLESS = 1 << 62
# What to put in place of a node: target and arguments.
Found = tuple[Any, tuple[Any, ...], dict[str, Any]] | None


def matched(program: ExportedProgram) -> ExportedProgram:
    """Return `program` with decomposed norms, rotations and GELUs replaced by single operators."""
    matcher = _Matcher(program)
    matcher.run()
    return matcher.program()


def is_call(node: Any, *targets: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def width_of(node: fx.Node) -> int:
    """Return the last size, 0 where it is symbolic."""
    size = node.meta["val"].shape[-1]
    return size if isinstance(size, int) else 0


class _Matcher(Rewriter):
    def run(self) -> None:
        for node in list(self._graph.nodes):
            if node.op == "call_function":
                self._simplify(node)
        for rule in (_rms_core, _rms_weight, _rotation, _partial_rotation, _new_gelu):
            for node in list(self._graph.nodes):
                found = rule(node) if node.op == "call_function" and node.users else None
                if found is not None:
                    self._put(node, *found)
            self._graph.eliminate_dead_code()
        self._drop_unused()

    def _simplify(self, node: fx.Node) -> None:
        """Remove casts to the same dtype and dtype checks.

        Copies into another memory layout go too: a view of the result has to be a reshape then.
        """
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
        if node.target is aten._assert_tensor_metadata.default:
            self._graph.erase_node(node)
        elif node.target in _SAME and isinstance(node.args[0], fx.Node):
            before, after = node.args[0].meta.get("val"), node.meta["val"]
            training = node.target is aten.dropout.default and node.args[2]
            if (
                before is not None
                and (before.dtype, before.device) == (after.dtype, after.device)
                and not training
            ):
                node.replace_all_uses_with(node.args[0])
                self._graph.erase_node(node)

    def _put(self, at: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self._graph.inserting_before(at):
            made = self._graph.call_function(target, args, kwargs)
        made.meta = dict(at.meta)
        at.replace_all_uses_with(made)


def _rms_core(node: Any) -> Found:
    """Match x * rsqrt(mean(x²) + eps)."""
    for x, root in _orders(node, aten.mul.Tensor):
        if not is_call(root, aten.rsqrt.default) or not is_call(root.args[0], aten.add.Tensor):
            continue
        mean, eps = root.args[0].args
        if not is_call(mean, aten.mean.dim) or not isinstance(eps, float) or mean.args[1:] != ([-1], True):
            continue
        power = mean.args[0]
        square = is_call(power, aten.pow.Tensor_Scalar) and power.args == (x, 2)
        square |= is_call(power, aten.square.default) and power.args == (x,)
        square |= is_call(power, aten.mul.Tensor) and power.args == (x, x)
        if square and _is_float(x):
            return own.rms_norm.default, (x, None, 0.0, eps), {}
    return None


def _rms_weight(node: Any) -> Found:
    """Match a norm times a weight, or one plus a weight."""
    for norm, weight in _orders(node, aten.mul.Tensor):
        if not is_call(norm, own.rms_norm.default) or norm.args[1] is not None or len(norm.users) > 1:
            continue
        offset = 0.0
        for vector, one in _orders(weight, aten.add.Tensor):
            if isinstance(one, (int, float)):
                weight, offset = vector, float(one)
        if not isinstance(weight, fx.Node) or weight.op != "placeholder" or not _is_float(weight):
            continue
        if tuple(weight.meta["val"].shape) == (width_of(norm),):
            return own.rms_norm.default, (norm.args[0], weight, offset, norm.args[3]), {}
    return None


def _rotation(node: Any) -> Found:
    """Match x * cos + cat(-b, a) * sin, x being (a, b)."""
    for straight, crossed in _orders(node, aten.add.Tensor):
        for turned, sin in _orders(crossed, aten.mul.Tensor):
            x = _half_turned(turned)
            if x is None:
                continue
            for same, cos in _orders(straight, aten.mul.Tensor):
                if same is x and width_of(cos) == width_of(sin) == width_of(x) and _is_float(x):
                    return own.rotate.default, (x, cos, sin), {}
    return None


def _partial_rotation(node: Any) -> Found:
    """Match cat(rotated first columns, the others)."""
    if not is_call(node, aten.cat.default) or len(node.args[0]) != 2 or not _last(node, 1):
        return None
    turned, rest = node.args[0]
    if not is_call(turned, own.rotate.default):
        return None
    first, cos, sin = turned.args
    begin, end = _slice_of(first), _slice_of(rest)
    if begin is None and width_of(rest) == 0:
        return own.rotate.default, turned.args, {}
    if begin is None or end is None or begin[0] is not end[0]:
        return None
    whole = begin[0]
    if begin[1:] == (0, width_of(cos)) and end[1:] == (width_of(cos), width_of(whole)):
        return own.rotate.default, (whole, cos, sin), {}
    return None


def _new_gelu(node: Any) -> Found:
    """Match 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x³)))."""
    for half, one_more in _orders(node, aten.mul.Tensor):
        for tanh, one in _orders(one_more, aten.add.Tensor):
            if one != 1.0 or not is_call(tanh, aten.tanh.default):
                continue
            for x, factor in _orders(half, aten.mul.Tensor):
                if factor == 0.5 and _is_float(x) and _inside_new_gelu(tanh.args[0], x):
                    return aten.gelu.default, (x,), {"approximate": "tanh"}
    return None


def _orders(node: Any, target: Any) -> list[tuple[Any, Any]]:
    """Yield the two operands of a call of `target` in both orders; nothing for other nodes."""
    if not is_call(node, target) or len(node.args) != 2 or node.kwargs:
        return []
    a, b = node.args
    return [(a, b), (b, a)]


def _is_float(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32 and value.device.type == "cpu"


def _last(node: Any, at: int) -> bool:
    """Tell if an operator works on the last axis, which argument `at` (default the first axis) names."""
    axis = node.args[at] if len(node.args) > at else 0
    return axis in (-1, node.meta["val"].dim() - 1)


def _slice_of(node: Any) -> tuple[fx.Node, int, int] | None:
    """Return the tensor that a slice of the last axis is cut from, and the range."""
    if not is_call(node, aten.slice.Tensor) or not _last(node, 1) or len(node.args) > 4:
        return None
    source, _, begin, end = (*node.args, ENDLESS)[:4]
    width = width_of(source)
    if not isinstance(begin, int) or not isinstance(end, int) or not width:
        return None
    begin, end = begin % width if begin < 0 else begin, end % width if end < 0 else end
    return source, begin, min(end, width)


def _half_turned(node: Any) -> fx.Node | None:
    """Return x where `node` is cat(-second half of x, first half), else None."""
    if not is_call(node, aten.cat.default) or len(node.args[0]) != 2 or not _last(node, 1):
        return None
    negative, first = node.args[0]
    if not is_call(negative, aten.neg.default):
        return None
    second, first = _slice_of(negative.args[0]), _slice_of(first)
    if second is None or first is None or first[0] is not second[0]:
        return None
    width = width_of(first[0])
    return first[0] if first[1:] == (0, width // 2) and second[1:] == (width // 2, width) else None


def _inside_new_gelu(node: Any, x: object) -> bool:
    for factor, inside in _orders(node, aten.mul.Tensor):
        if not isinstance(factor, float) or abs(factor - 0.7978845608) > 1e-6:
            continue
        for straight, cubic in _orders(inside, aten.add.Tensor):
            for small, cube in _orders(cubic, aten.mul.Tensor):
                if straight is x and small == 0.044715 and is_call(cube, aten.pow.Tensor_Scalar):
                    return bool(cube.args[0] is x and cube.args[1] == 3)
    return False
