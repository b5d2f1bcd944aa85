"""Operators along axes: reductions, softmax, norms, sorting, sums, products of matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .convolution import activated
from .elementwise import signed
from .operators import MICROSOFT, Node, operator
from .values import Unsupported, is_static, prod


def _prod(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = x.prod(axis, keepdim=keep)
    return x


def _mean(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if x.is_floating_point():
        return x.mean(axes, keepdim=keep)
    count = prod([x.shape[axis] for axis in axes])
    return torch.div(x.sum(axes, keepdim=keep), count, rounding_mode="trunc")


_REDUCTIONS: dict[str, Callable[[Tensor, list[int], bool], Tensor]] = {
    "ReduceSum": lambda x, axes, keep: x.sum(axes, keepdim=keep),
    "ReduceMean": _mean,
    "ReduceMax": lambda x, axes, keep: x.amax(axes, keepdim=keep),
    "ReduceMin": lambda x, axes, keep: x.amin(axes, keepdim=keep),
    "ReduceProd": _prod,
    "ReduceL1": lambda x, axes, keep: x.abs().sum(axes, keepdim=keep),
    "ReduceL2": lambda x, axes, keep: _root(x, axes, keep),
    "ReduceSumSquare": lambda x, axes, keep: (x * x).sum(axes, keepdim=keep),
    "ReduceLogSum": lambda x, axes, keep: x.sum(axes, keepdim=keep).log(),
    "ReduceLogSumExp": lambda x, axes, keep: torch.logsumexp(x, axes, keepdim=keep),
}


# What is left of a reduction along no axis.
_ALONE: dict[str, Callable[[Tensor], Tensor]] = {
    "ReduceL1": torch.abs,
    "ReduceL2": torch.abs,
    "ReduceSumSquare": torch.square,
    "ReduceLogSum": torch.log,
}


def _root(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    wide = x if x.is_floating_point() else x.double()
    return (wide * wide).sum(axes, keepdim=keep).sqrt()


@operator(*_REDUCTIONS, sizes=(1,))
def reduce(node: Node, x: Tensor, axes: list[int] | None = None) -> Tensor:
    """Reduce along axes; none given means all, or none where noop_with_empty_axes."""
    chosen = [int(axis) for axis in axes or ()]
    dtype = x.dtype
    if not chosen:
        if node.get("noop_with_empty_axes", 0):
            return _ALONE[node.op](x) if node.op in _ALONE else x
        chosen = list(range(x.dim()))
    chosen = [axis % max(x.dim(), 1) for axis in chosen]
    keep = bool(node.get("keepdims", 1))
    if node.op in ("ReduceMax", "ReduceMin") and any(
        is_static(x.shape[a]) and x.shape[a] == 0 for a in chosen if x.dim()
    ):
        return _reduce_nothing(node, x, chosen, keep)
    if not chosen and x.dim() == 0:
        x = x.reshape(1)
        chosen, keep = [0], False
    if node.op == "ReduceLogSumExp" and not x.is_floating_point():
        x = x.double()
    return signed(lambda value: _REDUCTIONS[node.op](value, chosen, keep))(x).to(dtype)


def _reduce_nothing(node: Node, x: Tensor, axes: list[int], keep: bool) -> Tensor:
    """Return the least or largest value of the dtype, of an axis of size 0."""
    shape = [1 if i in axes else n for i, n in enumerate(x.shape) if keep or i not in axes]
    most = node.op == "ReduceMax"
    if x.dtype == torch.bool:
        return torch.full(shape, not most)
    if x.is_floating_point():
        return torch.full(shape, -torch.inf if most else torch.inf, dtype=x.dtype)
    info = torch.iinfo(x.dtype)
    return torch.full(shape, info.min if most else info.max, dtype=x.dtype)


@operator("ArgMax", "ArgMin")
def arg(node: Node, x: Tensor) -> Tensor:
    axis, keep = node.get("axis", 0), bool(node.get("keepdims", 1))
    find = torch.argmax if node.op == "ArgMax" else torch.argmin
    x = x.to(torch.int32) if x.dtype == torch.bool else x
    if not node.get("select_last_index", 0):
        return find(x, axis, keepdim=keep)
    return x.shape[axis] - 1 - find(x.flip(axis), axis, keepdim=keep)


def _flattened(node: Node, x: Tensor, function: Callable[..., Tensor]) -> Tensor:
    """Apply to all axes from `axis` on as one, which the operators did before opset 13."""
    axis = node.get("axis", 1)
    axis = axis + x.dim() if axis < 0 else axis
    if axis == x.dim() - 1:
        return function(x, -1)
    return function(x.reshape(prod(x.shape[:axis]), prod(x.shape[axis:])), -1).reshape(x.shape)


_SOFT: dict[str, Callable[..., Tensor]] = {"Softmax": torch.softmax, "LogSoftmax": torch.log_softmax}


@operator("Softmax", "LogSoftmax")
def softmax_flattened(node: Node, x: Tensor) -> Tensor:
    return _flattened(node, x, _SOFT[node.op])


@operator("Softmax", "LogSoftmax", since=13)
def softmax(node: Node, x: Tensor) -> Tensor:
    return _SOFT[node.op](x, node.get("axis", -1))


def _hardmax(x: Tensor, axis: int) -> Tensor:
    best = x.argmax(axis, keepdim=True)
    return torch.zeros_like(x).scatter(axis, best, torch.ones_like(best, dtype=x.dtype))


@operator("Hardmax")
def hardmax_flattened(node: Node, x: Tensor) -> Tensor:
    return _flattened(node, x, _hardmax)


@operator("Hardmax", since=13)
def hardmax(node: Node, x: Tensor) -> Tensor:
    return _hardmax(x, node.get("axis", -1))


def _exclusive(node: Node, x: Tensor, axis: int, function: Callable[..., Tensor], neutral: int) -> Tensor:
    reverse = node.get("reverse", 0)
    data = x.flip(axis) if reverse else x
    found = function(data, axis).to(x.dtype)
    if node.get("exclusive", 0):
        first = torch.full_like(found.narrow(axis, 0, 1), neutral)
        found = torch.cat([first, found.narrow(axis, 0, found.shape[axis] - 1)], axis)
    return found.flip(axis) if reverse else found


@operator("CumSum", sizes=(1,))
def cumsum(node: Node, x: Tensor, axis: list[int]) -> Tensor:
    return _exclusive(node, x, axis[0], torch.cumsum, 0)


@operator("CumProd", sizes=(1,))
def cumprod(node: Node, x: Tensor, axis: list[int]) -> Tensor:
    return _exclusive(node, x, axis[0], torch.cumprod, 1)


@operator("TopK", sizes=(1,))
def top_k(node: Node, x: Tensor, k: list[Any]) -> tuple[Tensor, Tensor]:
    """Return the first k values in order; of equal ones the one of the lower index, as the specification says."""
    axis = node.get("axis", -1)
    data = x.to(torch.int64) if x.dtype in (torch.uint16, torch.uint32, torch.uint64) else x
    values, indices = torch.sort(data, dim=axis, descending=bool(node.get("largest", 1)), stable=True)
    return values.narrow(axis, 0, k[0]).to(x.dtype), indices.narrow(axis, 0, k[0])


@operator("MatMul")
def matmul(node: Node, a: Tensor, b: Tensor) -> Tensor:
    if a.dtype in (torch.uint32, torch.uint64):
        return torch.matmul(a.to(torch.int64), b.to(torch.int64)).to(a.dtype)
    return torch.matmul(a, b)


@operator("FusedMatMul", domain=MICROSOFT)
def fused_matmul(node: Node, a: Tensor, b: Tensor) -> Tensor:
    if node.get("transBatchA", 0) or node.get("transBatchB", 0):
        raise Unsupported("transposed batches")
    a = a.transpose(-1, -2) if node.get("transA", 0) else a
    b = b.transpose(-1, -2) if node.get("transB", 0) else b
    return node.get("alpha", 1.0) * torch.matmul(a, b)


@operator("Gemm")
def gemm(node: Node, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    a = a.t() if node.get("transA", 0) else a
    b = b.t() if node.get("transB", 0) else b
    alpha, beta = node.get("alpha", 1.0), node.get("beta", 1.0)
    if not a.is_floating_point():
        if alpha not in (0.0, 1.0) or beta not in (0.0, 1.0):
            raise Unsupported("integers with alpha or beta")
        alpha, beta = int(alpha), int(beta)
    product = torch.matmul(a, b)
    product = product if alpha == 1 else alpha * product
    if c is None:
        return product
    return product + (c if beta == 1 else beta * c)


@operator("FusedGemm", domain=MICROSOFT)
def fused_gemm(node: Node, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    return activated(node, gemm(node, a, b, c))


@operator("Einsum")
def einsum(node: Node, *inputs: Tensor) -> Tensor:
    return torch.einsum(node.get("equation").replace(" ", ""), *inputs)


@operator("Det")
def det(node: Node, x: Tensor) -> Tensor:
    return torch.linalg.det(x)


@operator("BatchNormalization")
def batch_norm(
    node: Node, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor
) -> Tensor | tuple[Tensor, ...]:
    if node.get("training_mode", 0) or (node.version < 14 and any(node.outputs[1:])):
        raise Unsupported("training mode")
    if node.get("spatial", 1) != 1:
        raise Unsupported("statistics for each place")
    if x.dtype == scale.dtype == mean.dtype:
        return F.batch_norm(x, mean, var, scale, bias, eps=node.get("epsilon", 1e-5))
    shape = [1, -1, *[1] * (x.dim() - 2)]
    std = (var.float() + node.get("epsilon", 1e-5)).sqrt().reshape(shape)
    found = (x.float() - mean.float().reshape(shape)) / std
    return (found * scale.float().reshape(shape) + bias.float().reshape(shape)).to(x.dtype)


@operator("InstanceNormalization")
def instance_norm(node: Node, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    axes = list(range(2, x.dim()))
    mean = x.mean(axes, keepdim=True)
    var = ((x - mean) ** 2).mean(axes, keepdim=True)
    shape = [1, -1, *[1] * (x.dim() - 2)]
    found = (x - mean) / torch.sqrt(var + node.get("epsilon", 1e-5))
    return found * scale.reshape(shape) + bias.reshape(shape)


@operator("LayerNormalization", since=17)
@operator("LayerNormalization")
def layer_norm(node: Node, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Any:
    axis, eps = node.get("axis", -1) % x.dim(), node.get("epsilon", 1e-5)
    last = axis == x.dim() - 1 and is_static(x.shape[-1]) and scale.shape == x.shape[-1:]
    if last and not any(node.outputs[1:]):
        return F.layer_norm(x, x.shape[-1:], scale, bias, eps)
    axes = list(range(axis, x.dim()))
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    mean = wide.mean(axes, keepdim=True)
    inverse = torch.rsqrt(((wide - mean) ** 2).mean(axes, keepdim=True) + eps)
    found = ((wide - mean) * inverse).to(x.dtype) * scale
    return found if bias is None else found + bias, mean, inverse


@operator("RMSNormalization")
@operator("SimplifiedLayerNormalization")
@operator("SimplifiedLayerNormalization", domain=MICROSOFT)
def rms_norm(node: Node, x: Tensor, scale: Tensor) -> Tensor:
    if any(node.outputs[1:]):
        raise Unsupported("its second output")
    axes = list(range(node.get("axis", -1) % x.dim(), x.dim()))
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    found = wide * torch.rsqrt((wide * wide).mean(axes, keepdim=True) + node.get("epsilon", 1e-5))
    return found.to(x.dtype) * scale


@operator("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_layer_norm(
    node: Node, x: Tensor, skip: Tensor, gamma: Tensor, beta: Tensor | None = None, bias: Tensor | None = None
) -> Any:
    """Add and normalize; SkipSimplifiedLayerNormalization has the bias where beta is, and no mean."""
    if any(node.outputs[1:3]):
        raise Unsupported("its mean and variance")
    eps = node.get("epsilon", 1e-12 if node.op == "SkipLayerNormalization" else 1e-5)
    if node.op == "SkipSimplifiedLayerNormalization":
        total = x + skip if beta is None else x + skip + beta
        found = total * torch.rsqrt((total * total).mean(-1, keepdim=True) + eps) * gamma
    else:
        total = x + skip if bias is None else x + skip + bias
        found = F.layer_norm(total, total.shape[-1:], gamma, beta, eps)
    return (found, None, None, total) if node.wants(3) else found


@operator("GroupNormalization")
def group_norm_by_group(node: Node, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Normalize groups; until opset 21 with a scale for each group."""
    per = x.shape[1] // node.get("num_groups")
    return F.group_norm(
        x,
        node.get("num_groups"),
        scale.repeat_interleave(per),
        bias.repeat_interleave(per),
        node.get("epsilon", 1e-5),
    )


@operator("GroupNormalization", since=21)
def group_norm(node: Node, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, node.get("num_groups"), scale, bias, node.get("epsilon", 1e-5))


@operator("LpNormalization")
def lp_normalization(node: Node, x: Tensor) -> Tensor:
    axis = node.get("axis", -1)
    size = (
        x.abs().sum(axis, keepdim=True) if node.get("p", 2) == 1 else (x * x).sum(axis, keepdim=True).sqrt()
    )
    return torch.where(size == 0, torch.zeros_like(x), x / size)


@operator("MeanVarianceNormalization")
def mean_variance(node: Node, x: Tensor) -> Tensor:
    axes = node.get("axes") or [0, 2, 3]
    mean = x.mean(axes, keepdim=True)
    std = ((x * x).mean(axes, keepdim=True) - mean * mean).sqrt()
    return (x - mean) / (std + 1e-9)


@operator("LRN")
def local_response(node: Node, x: Tensor) -> Tensor:
    size = node.get("size")
    before = (size - 1) // 2
    flat = (x * x).reshape(x.shape[0], 1, x.shape[1], -1)
    padded = F.pad(flat, (0, 0, before, size - 1 - before))
    total = F.avg_pool2d(padded, (size, 1), 1) * size
    scale = node.get("bias", 1.0) + node.get("alpha", 1e-4) / size * total.reshape(x.shape)
    return x / scale ** node.get("beta", 0.75)
