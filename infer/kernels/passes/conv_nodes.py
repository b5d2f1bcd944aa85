"""Additions, clamps and max-pools around a convolution in a functional aten graph."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

CONV = "infer.conv2d_int8_static.default"
ADD = "aten.add.Tensor"
POOL = "aten.max_pool2d.default"
_KEEP_SIGN = (POOL, "aten.avg_pool2d.default", "aten.adaptive_avg_pool2d.default", "aten.clone.default")


def bounds(node: fx.Node) -> tuple[float, float] | None:
    """Return the limits of any clamp; None for another operator."""
    name = str(node.target)
    if name == "aten.relu.default":
        return 0.0, math.inf
    if name == "aten.relu6.default":
        return 0.0, 6.0
    if name not in ("aten.hardtanh.default", "aten.clamp.default", "aten.clamp_min.default"):
        return None
    default = (-1.0, 1.0) if name == "aten.hardtanh.default" else (None, None)
    given: list[Any] = [*node.args[1:], *default[len(node.args) - 1 :]]
    if any(isinstance(limit, fx.Node) for limit in given) or node.kwargs:
        return None
    low, high = given[0], given[1]
    return (-math.inf if low is None else float(low)), (math.inf if high is None else float(high))


def never_negative(node: fx.Node) -> bool:
    """Return true if the operators of the graph exclude negative numbers in a value."""
    limits = bounds(node)
    if limits is not None:
        return limits[0] >= 0
    source = node.args[0] if node.args else None
    return str(node.target) in _KEEP_SIGN and isinstance(source, fx.Node) and never_negative(source)


def other_operand(add: fx.Node, one: fx.Node) -> fx.Node | None:
    """Return the value added to `one`, if it is float32 of the same shape."""
    if add.kwargs.get("alpha", 1) != 1 or len(add.args) != 2:
        return None
    others = [value for value in add.args if value is not one]
    if len(others) != 1 or not isinstance(others[0], fx.Node):
        return None
    first, second = one.meta["val"], others[0].meta.get("val")
    if second is None or first.dim() != 4 or second.dim() != 4 or first.dtype != second.dtype:
        return None
    if any(str(a) != str(b) for a, b in zip(first.shape, second.shape, strict=True)):
        return None
    return others[0]


def pool_window(node: fx.Node) -> list[int]:
    """Kernel, stride, padding and dilation of a max-pool, two numbers each."""
    default: list[Any] = [None, [], 0, 1]
    given = [*node.args[1:5], *default[len(node.args[1:5]) :]]
    given = [node.kwargs.get(name, value) for name, value in zip(_POOL_NAMES, given, strict=True)]
    kernel = _pair(given[0])
    return [*kernel, *(_pair(given[1]) if given[1] else kernel), *_pair(given[2]), *_pair(given[3])]


_POOL_NAMES = ("kernel_size", "stride", "padding", "dilation")


def _pair(value: Any) -> list[int]:
    sizes = [value, value] if isinstance(value, int) else [int(each) for each in value]
    return sizes * 2 if len(sizes) == 1 else sizes


def is_pool(node: fx.Node) -> bool:
    """Return true if a node is a max-pool of whole windows."""
    ceiling = node.kwargs.get("ceil_mode", node.args[5] if len(node.args) > 5 else False)
    return str(node.target) == POOL and not ceiling
