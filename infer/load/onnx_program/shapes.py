"""Operators that make, move, cut and look up data; their sizes may be symbolic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .elementwise import UNSIGNED
from .operators import Node, operator
from .values import Sizes, Unsupported, is_static, prod


@operator("Constant")
def constant(node: Node) -> Tensor:
    a = node.attributes
    if "value" in a:
        return a["value"]  # type: ignore[no-any-return]
    for name, dtype in (("value_float", torch.float32), ("value_floats", torch.float32)):
        if name in a:
            return torch.tensor(a[name], dtype=dtype)
    for name in ("value_int", "value_ints"):
        if name in a:
            return torch.tensor(a[name], dtype=torch.int64)
    raise Unsupported(f"a constant by {', '.join(a)}")


@operator("Shape")
def shape(node: Node, x: Any) -> Sizes:
    sizes = list(x.array.shape if isinstance(x, Sizes) else x.shape)
    return Sizes.of(sizes[node.get("start", 0) : node.get("end")])


@operator("Size")
def size(node: Node, x: Any) -> Sizes:
    return Sizes.of(x.array.size if isinstance(x, Sizes) else prod(x.shape))


@operator("ConstantOfShape", sizes=(0,))
def constant_of_shape(node: Node, sizes: list[Any]) -> Tensor:
    value = node.get("value", Sizes.of(0.0, torch.float32))
    return torch.full(sizes, value.list()[0], dtype=value.dtype)


@operator("Range")
def arange(node: Node, start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    values = [x.reshape(-1)[0].item() for x in (start, limit, delta)]
    return torch.arange(*values, dtype=start.dtype)


@operator("EyeLike")
def eye_like(node: Node, x: Tensor) -> Tensor:
    rows, columns = (torch.arange(n) for n in x.shape)
    dtype = node.dtype("dtype", x.dtype)
    return (columns[None, :] - rows[:, None] == node.get("k", 0)).to(dtype)


@operator("Reshape", sizes=(1,))
def reshape(node: Node, x: Tensor, wanted: list[Any]) -> Tensor:
    if not node.get("allowzero", 0):
        wanted = [x.shape[i] if is_static(n) and n == 0 else n for i, n in enumerate(wanted)]
    return x.reshape(wanted)


@operator("Flatten")
def flatten(node: Node, x: Tensor) -> Tensor:
    axis = node.get("axis", 1)
    axis = axis + x.dim() if axis < 0 else axis
    return x.reshape(prod(x.shape[:axis]), prod(x.shape[axis:]))


@operator("Transpose")
def transpose(node: Node, x: Tensor) -> Tensor:
    return x.permute(node.get("perm") or list(range(x.dim()))[::-1])


@operator("Squeeze", sizes=(1,))
def squeeze(node: Node, x: Tensor, axes: list[int] | None = None) -> Tensor:
    if axes is None:
        axes = [i for i, n in enumerate(x.shape) if n == 1]
    gone = {axis % x.dim() for axis in axes} if x.dim() else set()
    return x.reshape([n for i, n in enumerate(x.shape) if i not in gone])


@operator("Unsqueeze", sizes=(1,))
def unsqueeze(node: Node, x: Tensor, axes: list[int]) -> Tensor:
    rank = x.dim() + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


@operator("Expand", sizes=(1,))
def expand(node: Node, x: Tensor, wanted: list[Any]) -> Tensor:
    """Broadcast both ways: a size of 1 in the wanted shape keeps the input's."""
    rank = max(len(wanted), x.dim())
    have = [1] * (rank - x.dim()) + list(x.shape)
    want = [1] * (rank - len(wanted)) + list(wanted)
    return x.expand([h if is_static(w) and w == 1 else w for h, w in zip(have, want, strict=True)])


@operator("Tile", sizes=(1,))
def tile(node: Node, x: Tensor, repeats: list[Any]) -> Tensor:
    return x.repeat(repeats)


@operator("Concat")
def concat(node: Node, *parts: Tensor) -> Tensor:
    return torch.cat(parts, node.get("axis", 1))


@operator("Split", sizes=(1,))
def split(node: Node, x: Tensor, sizes: list[Any] | None = None) -> tuple[Tensor, ...]:
    """Cut into parts of given sizes, or as many as there are outputs: equal ones, the last smaller."""
    axis = node.get("axis", 0)
    if sizes is None:
        count = node.get("num_outputs", len(node.outputs))
        each = (x.shape[axis] + count - 1) // count
        sizes = [each] * (count - 1)
        sizes.append(x.shape[axis] - each * (count - 1))
    return torch.split(x, sizes, axis)


@operator("Slice", sizes=(1, 2, 3, 4))
def slice_(
    node: Node,
    x: Tensor,
    starts: list[Any],
    ends: list[Any],
    axes: list[int] | None = None,
    steps: list[Any] | None = None,
) -> Tensor:
    axes, steps = axes or list(range(len(starts))), steps or [1] * len(starts)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        axis = axis % x.dim()
        if is_static(step) and step > 0:
            end = None if is_static(end) and end >= 2**31 - 1 else end
            cut = [slice(None)] * axis + [slice(start, end, step)]
            x = x[tuple(cut)]
        else:
            x = _backwards(x, axis, start, end, step)
    return x


def _backwards(x: Tensor, axis: int, start: Any, end: Any, step: Any) -> Tensor:
    """Cut with a negative step, which torch does not have: turned around and cut forward."""
    size = x.shape[axis]
    if is_static(start) and start >= 2**31 - 1:
        first: Any = 0
    else:
        start = start + size if start < 0 else start
        first = torch.sym_max(size - 1 - start, 0)
    if is_static(end) and end < -(2**30):
        last = size
    else:
        end = end + size if end < 0 else end
        last = size if is_static(end) and end < 0 else torch.sym_max(size - 1 - end, 0)
    cut = [slice(None)] * axis + [slice(first, last, -step)]
    return x.flip(axis)[tuple(cut)]


@operator("Gather")
def gather(node: Node, x: Tensor, indices: Tensor) -> Tensor:
    axis = node.get("axis", 0) % max(x.dim(), 1)
    known = node.known.get(1)
    if known is not None and indices.dim() == 0:
        return x.select(axis, known[0])
    if known is None or min(known, default=0) < 0:
        indices = _positive(indices, x.shape[axis])
    found = x.index_select(axis, indices.reshape(-1).to(torch.int64))
    return found.reshape([*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]])


def _positive(indices: Tensor, size: Any) -> Tensor:
    indices = indices.to(torch.int64)
    return torch.where(indices < 0, indices + size, indices)


@operator("GatherElements")
def gather_elements(node: Node, x: Tensor, indices: Tensor) -> Tensor:
    axis = node.get("axis", 0)
    return torch.gather(x, axis, _positive(indices, x.shape[axis]))


@operator("GatherND")
def gather_nd(node: Node, x: Tensor, indices: Tensor) -> Tensor:
    """Look up slices by tuples of indices: each batch row by its own."""
    batch, depth = node.get("batch_dims", 0), int(indices.shape[-1])
    flat = prod(x.shape[batch : batch + depth])
    rows = prod(x.shape[:batch])
    place = _flat_places(indices, list(x.shape[batch : batch + depth])).reshape(rows, -1)
    data = x.reshape(rows, flat, -1) if x.dim() > batch + depth else x.reshape(rows, flat, 1)
    offset = torch.arange(rows)[:, None] * flat
    found = data.reshape(rows * flat, -1).index_select(0, (place + offset).reshape(-1))
    return found.reshape([*indices.shape[:-1], *x.shape[batch + depth :]])


def _flat_places(indices: Tensor, sizes: list[Any]) -> Tensor:
    """Turn tuples of indices along the last axis into places in the flattened data."""
    place: Any = 0
    for i, size in enumerate(sizes):
        place = place * size + _positive(indices[..., i], size)
    return place  # type: ignore[no-any-return]


@operator("Scatter", "ScatterElements")
def scatter_elements(node: Node, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    axis, how = node.get("axis", 0), node.get("reduction", "none")
    places = _positive(indices, x.shape[axis])
    if how == "none":
        return x.scatter(axis, places, updates)
    names = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
    return x.scatter_reduce(axis, places, updates, names[how], include_self=True)


@operator("ScatterND")
def scatter_nd(node: Node, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    depth, how = int(indices.shape[-1]), node.get("reduction", "none")
    flat = prod(x.shape[:depth])
    place = _flat_places(indices, list(x.shape[:depth])).reshape(-1)
    data = x.reshape(flat, -1) if x.dim() > depth else x.reshape(flat, 1)
    rows = updates.reshape(place.shape[0], data.shape[1])
    if how == "none":
        found = data.index_copy(0, place, rows)
    else:
        names = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
        found = data.scatter_reduce(0, place[:, None].expand_as(rows), rows, names[how], include_self=True)
    return found.reshape(x.shape)


@operator("TensorScatter")
def tensor_scatter(node: Node, past: Tensor, update: Tensor, start: Tensor | None = None) -> Tensor:
    """Write rows of a cache from a place on, around its end where mode is circular."""
    axis = node.get("axis", -2) % past.dim()
    length = update.shape[axis]
    begin = torch.zeros(past.shape[0], dtype=torch.int64) if start is None else start.to(torch.int64)
    place = begin[:, None] + torch.arange(length)[None, :]
    if node.get("mode", "linear") == "circular":
        place = place % past.shape[axis]
    shape = [1] * past.dim()
    shape[0], shape[axis] = place.shape[0], length
    return past.scatter(axis, place.reshape(shape).expand(update.shape), update)


@operator("Pad", sizes=(1, 3))
def pad(
    node: Node, x: Tensor, pads: list[Any], value: Tensor | None = None, axes: list[int] | None = None
) -> Tensor:
    if axes is not None:
        half = len(axes)
        whole: list[Any] = [0] * (2 * x.dim())
        for i, axis in enumerate(axes):
            whole[axis % x.dim()], whole[axis % x.dim() + x.dim()] = pads[i], pads[half + i]
        pads = whole
    number: Any = 0 if value is None else node.known.get(2, [value])[0]
    return _pad(x, pads, node.get("mode", "constant"), number)


def _pad(x: Tensor, pads: list[Any], mode: str, value: Any) -> Tensor:
    rank = x.dim()
    before, after = pads[:rank], pads[rank:]
    if mode == "constant":
        if isinstance(value, Tensor):
            value = value.reshape(-1)[0].item()
        own = x.dtype
        x = x.to(torch.int64) if own in UNSIGNED else x
        flat = [n for b, a in zip(before[::-1], after[::-1], strict=True) for n in (b, a)]
        while len(flat) > 2 and all(is_static(n) and n == 0 for n in flat[-2:]):
            flat = flat[:-2]
        return F.pad(x, flat, value=value).to(own)
    for axis in range(rank):
        b, a = before[axis], after[axis]
        if is_static(b) and is_static(a) and b == 0 and a == 0:
            continue
        size = x.shape[axis]
        place = torch.arange(-b, size + a)
        if mode == "edge":
            place = place.clamp(0, size - 1)
        elif mode == "wrap":
            place = torch.remainder(place, size)
        elif mode == "reflect":
            period = 2 * (size - 1)
            place = torch.remainder(place, period) if not is_static(period) or period else place * 0
            place = torch.where(place >= size, 2 * (size - 1) - place, place)
        else:
            raise Unsupported(f"mode {mode}")
        x = x.index_select(axis, place)
    return x


@operator("Trilu", sizes=(1,))
def trilu(node: Node, x: Tensor, k: list[Any] | None = None) -> Tensor:
    shift = k[0] if k else 0
    rows, columns = torch.arange(x.shape[-2])[:, None], torch.arange(x.shape[-1])[None, :]
    kept = columns - rows >= shift if node.get("upper", 1) else columns - rows <= shift
    return torch.where(kept, x, torch.zeros_like(x))


@operator("OneHot", sizes=(1,))
def one_hot(node: Node, indices: Tensor, depth: list[Any], values: Tensor) -> Tensor:
    """Mark indices along a new axis; an index outside of -depth … depth - 1 marks none."""
    count, rank = int(depth[0]) if is_static(depth[0]) else depth[0], indices.dim() + 1
    axis = node.get("axis", -1) % rank
    whole = indices.to(torch.int64)
    whole = torch.where(whole < 0, whole + count, whole).unsqueeze(axis)
    shape = [1] * rank
    shape[axis] = count
    hot = whole == torch.arange(count).reshape(shape)
    return torch.where(hot, values[1], values[0])


@operator("NonZero")
def non_zero(node: Node, x: Tensor) -> Tensor:
    return x.nonzero().t() if x.dim() else x.reshape(1).nonzero().t()[:0]


@operator("Compress")
def compress(node: Node, x: Tensor, condition: Tensor) -> Tensor:
    axis = node.get("axis")
    data = x.reshape(-1) if axis is None else x
    return data.index_select(axis or 0, condition.nonzero().reshape(-1))


@operator("ReverseSequence")
def reverse_sequence(node: Node, x: Tensor, lengths: Tensor) -> Tensor:
    time, batch = node.get("time_axis", 0), node.get("batch_axis", 1)
    place = torch.arange(x.shape[time])[:, None]
    place = torch.where(place < lengths[None, :], lengths[None, :] - 1 - place, place)  # [time, batch]
    place = place if time == 0 else place.t()
    del batch
    return torch.gather(x, time, place.reshape([*place.shape, *[1] * (x.dim() - 2)]).expand(x.shape))


@operator("DepthToSpace")
def depth_to_space(node: Node, x: Tensor) -> Tensor:
    b, (n, c, h, w) = node.get("blocksize"), x.shape
    if node.get("mode", "DCR") == "DCR":
        return x.reshape(n, b, b, c // (b * b), h, w).permute(0, 3, 4, 1, 5, 2).reshape(n, -1, h * b, w * b)
    return x.reshape(n, c // (b * b), b, b, h, w).permute(0, 1, 4, 2, 5, 3).reshape(n, -1, h * b, w * b)


@operator("SpaceToDepth")
def space_to_depth(node: Node, x: Tensor) -> Tensor:
    b, (n, c, h, w) = node.get("blocksize"), x.shape
    parts = x.reshape(n, c, h // b, b, w // b, b)
    order = (0, 3, 5, 1, 2, 4) if node.get("mode", "DCR") == "DCR" else (0, 1, 3, 5, 2, 4)
    return parts.permute(order).reshape(n, c * b * b, h // b, w // b)


@operator("Unique")
def unique(node: Node, x: Tensor) -> tuple[Tensor, ...]:
    """Return distinct values, where each was first, which each is, and how often."""
    axis = node.get("axis")
    data = x.reshape(-1) if axis is None else x
    dim = 0 if axis is None else axis
    values, inverse, counts = torch.unique(data, return_inverse=True, return_counts=True, dim=dim)
    number = torch.arange(inverse.shape[0])
    first = torch.full((counts.shape[0],), inverse.shape[0]).scatter_reduce(0, inverse, number, "amin")
    if not node.get("sorted", 1):
        order = first.argsort()
        values, first, counts = values.index_select(dim, order), first[order], counts[order]
        inverse = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0]))[inverse]
    return values, first, inverse, counts


@operator("Col2Im", sizes=(1, 2))
def col2im(node: Node, x: Tensor, image: list[Any], block: list[Any]) -> Tensor:
    rank = len(image)
    pads = node.get("pads") or [0] * (2 * rank)
    if rank != 2 or pads[:2] != pads[2:]:
        raise Unsupported(f"{rank} dimensions" if rank != 2 else "uneven pads")
    strides, dilations = node.get("strides") or [1, 1], node.get("dilations") or [1, 1]
    wanted = (tuple(sizes) for sizes in (image, block, dilations, pads[:2], strides))
    return F.fold(x, *wanted)


@operator("CenterCropPad", sizes=(1,))
def center_crop_pad(node: Node, x: Tensor, wanted: list[Any]) -> Tensor:
    axes = node.get("axes") or list(range(x.dim()))
    for axis, want in zip((axis % x.dim() for axis in axes), wanted, strict=True):
        have = x.shape[axis]
        if want < have:
            x = x.narrow(axis, (have - want) // 2, want)
        elif want > have:
            pads: list[Any] = [0] * (2 * x.dim())
            pads[axis], pads[axis + x.dim()] = (want - have) // 2, want - have - (want - have) // 2
            x = _pad(x, pads, "constant", 0)
    return x
