"""Operators on sizes: arithmetic of shapes with symbolic numbers, in arrays of objects."""

from __future__ import annotations

import math
import operator as op
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .operators import Node, on_sizes
from .values import MOST, Sizes, is_static, torch_dtype, whole

_WIDER = (torch.bool, torch.int32, torch.int64, torch.float32, torch.float64)


def _each(function: Callable[..., Any], *arrays: np.ndarray) -> np.ndarray:
    """Apply a function of numbers to broadcast arrays of objects."""
    together = np.broadcast_arrays(*arrays)
    out = np.empty(together[0].shape, object)
    for place in np.ndindex(out.shape):
        out[place] = function(*(array[place] for array in together))
    return out


def _divide(node: Node, a: Any, b: Any, dtype: torch.dtype) -> Any:
    if dtype.is_floating_point:
        a, b = whole(a), whole(b)
        if is_static(b) and b == 1:
            return a
        return math.nan if is_static(b) and b == 0 else a / b
    if is_static(a) and is_static(b):
        return int(a / b) if abs(a) < 2**50 else a // b  # toward zero
    return a // b  # sizes are not negative


def _most(a: Any, b: Any) -> Any:
    return torch.sym_max(a, b)


def _least(a: Any, b: Any) -> Any:
    return torch.sym_min(a, b)


def _times(a: Any, b: Any) -> Any:
    return whole(a) * whole(b)


_BINARY = {"Add": op.add, "Sub": op.sub, "Mul": _times, "Max": _most, "Min": _least}
_COMPARED = {"Equal": op.eq, "Less": op.lt, "LessOrEqual": op.le, "Greater": op.gt, "GreaterOrEqual": op.ge}
_LOGICAL = {"And": op.and_, "Or": op.or_, "Xor": op.xor}


@on_sizes(*_BINARY)
def binary(node: Node, first: Sizes, *others: Sizes) -> Sizes:
    array = first.array
    for other in others:
        array = _each(_BINARY[node.op], array, other.array)
    return Sizes.of(array, first.dtype)


@on_sizes("Div")
def divide(node: Node, a: Sizes, b: Sizes) -> Sizes | None:
    if not a.dtype.is_floating_point and any(is_static(v) and v == 0 for v in b.list()):
        return None
    return Sizes.of(_each(lambda x, y: _divide(node, x, y, a.dtype), a.array, b.array), a.dtype)


@on_sizes("Mod")
def modulo(node: Node, a: Sizes, b: Sizes) -> Sizes | None:
    if node.get("fmod", 0) or any(is_static(v) and v == 0 for v in b.list()):
        return None
    return Sizes.of(_each(op.mod, a.array, b.array), a.dtype)


@on_sizes(*_COMPARED)
def compare(node: Node, a: Sizes, b: Sizes) -> Sizes:
    """Compare; of symbolic sizes the answer becomes a condition of the captured program."""
    return Sizes.of(_each(lambda x, y: bool(_COMPARED[node.op](x, y)), a.array, b.array), torch.bool)


@on_sizes(*_LOGICAL)
def logical(node: Node, a: Sizes, b: Sizes) -> Sizes:
    return Sizes.of(_each(_LOGICAL[node.op], a.array, b.array), torch.bool)


@on_sizes("Not")
def negation(node: Node, a: Sizes) -> Sizes:
    return Sizes.of(_each(op.not_, a.array), torch.bool)


@on_sizes("Where")
def where(node: Node, condition: Sizes, a: Sizes, b: Sizes) -> Sizes:
    return Sizes.of(_each(lambda c, x, y: x if c else y, condition.array, a.array, b.array), a.dtype)


@on_sizes("Neg", "Abs", "Floor", "Ceil")
def unary(node: Node, a: Sizes) -> Sizes:
    own: dict[str, Callable[[Any], Any]] = {"Neg": op.neg, "Abs": abs, "Floor": _floor, "Ceil": _ceil}
    return Sizes.of(_each(own[node.op], a.array), a.dtype)


def _floor(a: Any) -> Any:
    return a if is_static(a) and not math.isfinite(a) else math.floor(a)


def _ceil(a: Any) -> Any:
    return a if is_static(a) and not math.isfinite(a) else math.ceil(a)


@on_sizes("Cast")
def cast(node: Node, a: Sizes) -> Sizes | None:
    dtype = torch_dtype(int(node.get("to")))
    return _cast(a, dtype)


@on_sizes("CastLike")
def cast_like(node: Node, a: Sizes, b: Sizes) -> Sizes | None:
    return _cast(a, b.dtype)


def _cast(a: Sizes, dtype: torch.dtype) -> Sizes | None:
    if dtype not in _WIDER:
        return None
    if dtype == torch.bool:
        return Sizes.of(_each(lambda v: bool(v != 0), a.array), dtype)
    if dtype.is_floating_point:
        return Sizes.of(_each(lambda v: float(v) if isinstance(v, bool) else v, a.array), dtype)
    if any(is_static(v) and not math.isfinite(v) for v in a.list()):
        return None
    return Sizes.of(_each(lambda v: int(v) if is_static(v) else torch.sym_int(v), a.array), dtype)


@on_sizes("Identity")
def identity(node: Node, a: Sizes) -> Sizes:
    return a


@on_sizes("Gather")
def gather(node: Node, a: Sizes, indices: Sizes) -> Sizes | None:
    if not all(is_static(i) for i in indices.list()):
        return None
    return Sizes.of(np.take(a.array, indices.array.astype(np.int64), node.get("axis", 0)), a.dtype)


@on_sizes("Concat")
def concat(node: Node, *parts: Sizes) -> Sizes | None:
    if sum(part.array.size for part in parts) > MOST:
        return None
    return Sizes.of(np.concatenate([part.array for part in parts], node.get("axis", 0)), parts[0].dtype)


@on_sizes("Slice")
def slice_(
    node: Node, a: Sizes, first: Sizes, last: Sizes, along: Sizes | None = None, step: Sizes | None = None
) -> Sizes | None:
    starts, ends = first.list(), last.list()
    axes = along.list() if along is not None else range(len(starts))
    steps = step.list() if step is not None else [1] * len(starts)
    if not all(is_static(v) for part in (starts, ends, axes, steps) for v in part):
        return None
    cut = [slice(None)] * a.array.ndim
    for axis, start, end, by in zip(axes, starts, ends, steps, strict=True):
        size = a.array.shape[axis]
        end = None if by < 0 and end < -size else end  # before the first
        cut[axis] = slice(start, end, by)
    return Sizes.of(a.array[tuple(cut)], a.dtype)


@on_sizes("Unsqueeze")
def unsqueeze(node: Node, a: Sizes, axes: Sizes) -> Sizes:
    return Sizes.of(np.expand_dims(a.array, tuple(axes.list())), a.dtype)


@on_sizes("Squeeze")
def squeeze(node: Node, a: Sizes, axes: Sizes | None = None) -> Sizes:
    return Sizes.of(np.squeeze(a.array, None if axes is None else tuple(axes.list())), a.dtype)


@on_sizes("Reshape")
def reshape(node: Node, a: Sizes, shape: Sizes) -> Sizes | None:
    wanted = shape.list()
    if not all(is_static(v) for v in wanted) or (0 in wanted and node.get("allowzero", 0)):
        return None
    wanted = [a.array.shape[i] if v == 0 else v for i, v in enumerate(wanted)]
    return Sizes.of(a.array.reshape(wanted), a.dtype)


@on_sizes("Transpose")
def transpose(node: Node, a: Sizes) -> Sizes:
    return Sizes.of(np.transpose(a.array, node.get("perm")), a.dtype)


@on_sizes("Expand")
def expand(node: Node, a: Sizes, shape: Sizes) -> Sizes | None:
    wanted = shape.list()
    if not all(is_static(v) for v in wanted) or math.prod(wanted) > MOST:
        return None
    return Sizes.of(np.broadcast_to(a.array, np.broadcast_shapes(a.array.shape, tuple(wanted))), a.dtype)


@on_sizes("Tile")
def tile(node: Node, a: Sizes, repeats: Sizes) -> Sizes | None:
    wanted = repeats.list()
    if not all(is_static(v) for v in wanted) or math.prod(wanted) * a.array.size > MOST:
        return None
    return Sizes.of(np.tile(a.array, wanted), a.dtype)


@on_sizes("ConstantOfShape")
def constant_of_shape(node: Node, shape: Sizes) -> Sizes | None:
    wanted, value = shape.list(), node.get("value", Sizes.of(0.0, torch.float32))
    if not all(is_static(v) for v in wanted) or math.prod(wanted) > MOST or value.dtype not in _WIDER:
        return None
    out = np.empty(wanted, object)
    out[...] = value.list()[0]
    return Sizes.of(out, value.dtype)


@on_sizes("Range")
def range_(node: Node, start: Sizes, limit: Sizes, delta: Sizes) -> Sizes | Tensor:
    """Count up to a size: numbers where that is fixed and small, else a tensor."""
    values = [*start.list(), *limit.list(), *delta.list()]
    if all(isinstance(v, int) for v in values) and len(range(*values)) <= MOST:
        return Sizes.of(list(range(*values)), start.dtype)
    return torch.arange(*values, dtype=start.dtype)


@on_sizes("ReduceProd", "ReduceSum", "ReduceMax", "ReduceMin")
def reduce(node: Node, a: Sizes, axes: Sizes | None = None) -> Sizes | None:
    every = axes is None or not axes.list()
    if a.array.ndim != 1 or not a.array.size or (every and node.get("noop_with_empty_axes", 0)):
        return None
    steps = {"ReduceProd": _times, "ReduceSum": op.add, "ReduceMax": _most, "ReduceMin": _least}
    result = a.array[0]
    for value in a.array[1:]:
        result = steps[node.op](result, value)
    return Sizes.of([result] if node.get("keepdims", 1) else result, a.dtype)


@on_sizes("Split")
def split(node: Node, a: Sizes, parts: Sizes | None = None) -> tuple[Sizes, ...] | None:
    sizes = None if parts is None else parts.list()
    if a.array.ndim != 1:
        return None
    if sizes is None:
        each = -(-a.array.size // len(node.outputs))
        sizes = [each] * len(node.outputs)
    if not all(is_static(v) for v in sizes):
        return None
    places = np.cumsum(sizes)[:-1]
    return tuple(Sizes.of(part, a.dtype) for part in np.split(a.array, places))


@on_sizes("ScatterND")
def scatter_nd(node: Node, a: Sizes, indices: Sizes, updates: Sizes) -> Sizes | None:
    if a.array.ndim != 1 or node.get("reduction", "none") != "none":
        return None
    if not all(is_static(v) for v in indices.list()):
        return None
    out = a.array.copy()
    for place, value in zip(indices.list(), updates.list(), strict=True):
        out[int(place)] = value
    return Sizes.of(out, a.dtype)


@on_sizes("Shape")
def shape_of(node: Node, a: Sizes) -> Sizes:
    return Sizes.of(list(a.array.shape)[node.get("start", 0) : node.get("end")])


@on_sizes("Size")
def size_of(node: Node, a: Sizes) -> Sizes:
    return Sizes.of(a.array.size)
