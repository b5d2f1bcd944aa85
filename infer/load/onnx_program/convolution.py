"""Convolution and pooling with ONNX's paddings: explicit, uneven, or automatic by the output size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .operators import MICROSOFT, Node, operator
from .values import Unsupported, is_static, prod

_CONVS: list[Callable[..., Tensor]] = [F.conv1d, F.conv2d, F.conv3d]
_TRANSPOSED: list[Callable[..., Tensor]] = [F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d]
_MODULES: dict[str, list[Any]] = {
    "Conv": [nn.Conv1d, nn.Conv2d, nn.Conv3d],
    "ConvTranspose": [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d],
}
_MAX_POOLS: list[Callable[..., Any]] = [F.max_pool1d, F.max_pool2d, F.max_pool3d]
_AVERAGE_POOLS: list[Callable[..., Tensor]] = [F.avg_pool1d, F.avg_pool2d, F.avg_pool3d]


def _window(node: Node, rank: int) -> tuple[list[int], list[int]]:
    """Return strides and dilations."""
    return list(node.get("strides") or [1] * rank), list(node.get("dilations") or [1] * rank)


def paddings(node: Node, sizes: list[Any], kernel: list[int]) -> tuple[list[Any], list[Any]]:
    """Return the padding before and after each axis; `SAME_…` gives ceil(size / stride) outputs."""
    rank, how = len(kernel), node.get("auto_pad", "NOTSET")
    if how in ("", "NOTSET"):
        pads = list(node.get("pads") or [0] * (2 * rank))
        return pads[:rank], pads[rank:]
    if how == "VALID":
        return [0] * rank, [0] * rank
    strides, dilations = _window(node, rank)
    before, after = [], []
    for size, k, s, d in zip(sizes, kernel, strides, dilations, strict=True):
        total = ((size + s - 1) // s - 1) * s + (k - 1) * d + 1 - size
        total = max(total, 0) if is_static(total) else torch.sym_max(total, 0)
        less = total // 2
        before.append(less if how == "SAME_UPPER" else total - less)
        after.append(total - before[-1])
    return before, after


def _even(before: list[Any], after: list[Any]) -> bool:
    return all(
        is_static(b) and is_static(a) and b == a and b >= 0 for b, a in zip(before, after, strict=True)
    )


def pad_space(x: Tensor, before: list[Any], after: list[Any], value: float = 0.0) -> Tensor:
    flat = [n for b, a in zip(before[::-1], after[::-1], strict=True) for n in (b, a)]
    return F.pad(x, flat, value=value) if not all(is_static(n) and n == 0 for n in flat) else x


def _dimensions(rank: int) -> int:
    if not 1 <= rank <= 3:
        raise Unsupported(f"{rank} spatial dimensions")
    return rank - 1


@operator("Conv")
def conv(node: Node, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    kernel = list(weight.shape[2:])
    strides, dilations = _window(node, len(kernel))
    before, after = paddings(node, list(x.shape[2:]), kernel)
    groups, function = node.get("group", 1), _CONVS[_dimensions(len(kernel))]
    if _even(before, after):
        return function(x, weight, bias, strides, before, dilations, groups)
    return function(pad_space(x, before, after), weight, bias, strides, 0, dilations, groups)


@operator("ConvTranspose")
def conv_transpose(node: Node, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Convolve transposed: the whole result, cut by the paddings, which `output_shape` may give."""
    kernel = list(weight.shape[2:])
    rank, groups = len(kernel), node.get("group", 1)
    strides, dilations = _window(node, rank)
    extra = list(node.get("output_padding") or [0] * rank)
    function = _TRANSPOSED[_dimensions(rank)]
    before, after = _transposed_paddings(node, list(x.shape[2:]), kernel, extra)
    whole = function(x, weight, None, strides, 0, 0, groups, dilations)
    whole = pad_space(whole, [-b for b in before], [e - a for e, a in zip(extra, after, strict=True)])
    return whole if bias is None else whole + bias.reshape(1, -1, *[1] * rank)


def _transposed_paddings(
    node: Node, sizes: list[Any], kernel: list[int], extra: list[int]
) -> tuple[list[Any], list[Any]]:
    rank, how, wanted = len(kernel), node.get("auto_pad", "NOTSET"), node.get("output_shape")
    if wanted is None and how in ("", "NOTSET", "VALID"):
        return paddings(node, sizes, kernel)
    strides, dilations = _window(node, rank)
    before, after = [], []
    for i, (size, k, s, d) in enumerate(zip(sizes, kernel, strides, dilations, strict=True)):
        want = list(wanted)[-rank:][i] if wanted is not None else size * s
        total = (size - 1) * s + extra[i] + (k - 1) * d + 1 - want
        if is_static(total):
            total = max(total, 0) if wanted is None else total
        less = total // 2
        before.append(less if how == "SAME_UPPER" else total - less)
        after.append(total - before[-1])
    return before, after


@operator("FusedConv", domain=MICROSOFT)
def fused_conv(
    node: Node, x: Tensor, weight: Tensor, bias: Tensor | None = None, added: Tensor | None = None
) -> Tensor:
    found = conv(node, x, weight, bias)
    return activated(node, found if added is None else found + added)


def activated(node: Node, x: Tensor) -> Tensor:
    """Apply the activation that onnxruntime fused into a node."""
    name, parameters = node.get("activation", ""), list(node.get("activation_params") or [])
    if name == "Clip":
        return x.clamp(*parameters)
    if name == "LeakyRelu":
        return F.leaky_relu(x, *(parameters or [node.get("leaky_relu_alpha", 0.01)]))
    if name == "HardSigmoid":
        return (x * parameters[0] + parameters[1]).clamp(0, 1)
    known = {"": lambda y: y, "Relu": torch.relu, "Tanh": torch.tanh, "Sigmoid": torch.sigmoid}
    if name not in known:
        raise Unsupported(f"activation {name}")
    return known[name](x)  # type: ignore[no-any-return]


def module_of(node: Node) -> nn.Module | None:
    """Return the convolution layer of constant weights, or None where torch has none of this kind."""
    weight = node.constants.get(1)
    if weight is None or not weight.is_floating_point():
        return None
    if len(node.inputs) > 2 and node.inputs[2] and 2 not in node.constants:
        return None
    rank, groups = weight.dim() - 2, node.get("group", 1)
    if not 1 <= rank <= 3 or node.get("auto_pad", "NOTSET") not in (
        "",
        "NOTSET",
        "VALID",
        "SAME_UPPER",
        "SAME_LOWER",
    ):
        return None
    strides, dilations = _window(node, rank)
    kernel = list(weight.shape[2:])
    options: dict[str, Any] = {"stride": strides, "dilation": dilations, "groups": groups}
    fixed = node.get("auto_pad", "NOTSET") in ("", "NOTSET", "VALID")
    before, after = paddings(node, [], kernel) if fixed else ([0], [1])
    even = _even(before, after)
    if node.op == "ConvTranspose":
        extra = list(node.get("output_padding") or [0] * rank)
        if (
            not even
            or node.get("output_shape") is not None
            or any(e >= s for e, s in zip(extra, strides, strict=True))
        ):
            return None
        options["output_padding"] = extra
        channels = weight.shape[0], weight.shape[1] * groups
    else:
        channels = weight.shape[1] * groups, weight.shape[0]
    bias = node.constants.get(2)
    layer: nn.Module = _MODULES[node.op][rank - 1](
        *channels,
        kernel,
        padding=before if even else 0,
        bias=bias is not None,
        device="meta",
        dtype=weight.dtype,
        **options,
    )
    layer.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.contiguous(), requires_grad=False)
    return layer


def call(layer: nn.Module, node: Node, x: Tensor) -> Tensor:
    """Run a convolution layer; uneven and automatic paddings are added to its input."""
    if node.op == "Conv":
        before, after = paddings(node, list(x.shape[2:]), list(layer.kernel_size))  # type: ignore[arg-type]
        if not _even(before, after) or list(before) != list(layer.padding):  # type: ignore[arg-type]
            x = pad_space(x, before, after)
    return layer(x)  # type: ignore[no-any-return]


def _pool_paddings(node: Node, sizes: list[Any], kernel: list[int]) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the paddings and what is added after them so that `ceil_mode` has its last window."""
    before, after = paddings(node, sizes, kernel)
    more: list[Any] = [0] * len(kernel)
    if node.get("ceil_mode", 0) and node.get("auto_pad", "NOTSET") in ("", "NOTSET"):
        strides, dilations = _window(node, len(kernel))
        for i, (size, k, s, d) in enumerate(zip(sizes, kernel, strides, dilations, strict=True)):
            reach, have = (k - 1) * d + 1, size + before[i] + after[i]
            count = (have - reach + s - 1) // s + 1
            if (count - 1) * s >= size + before[i]:  # the last window would begin in the padding
                count = count - 1
            more[i] = torch.sym_max((count - 1) * s + reach - have, 0)
    return before, after, more


@operator("MaxPool")
def max_pool(node: Node, x: Tensor) -> Any:
    kernel = list(node.get("kernel_shape"))
    strides, dilations = _window(node, len(kernel))
    before, after, more = _pool_paddings(node, list(x.shape[2:]), kernel)
    pool, own = _MAX_POOLS[_dimensions(len(kernel))], x.dtype
    least = float("-inf")
    if not x.is_floating_point():
        least = float(torch.iinfo(own).min)
        x = x.double()
    simple = _even(before, after) and all(is_static(m) and m == 0 for m in more)
    simple = (
        simple and all(2 * b <= k for b, k in zip(before, kernel, strict=True)) and least == float("-inf")
    )
    if simple:
        found = pool(x, kernel, strides, before, dilations, False, node.wants(1))
    else:
        last = [a + m for a, m in zip(after, more, strict=True)]
        padded = pad_space(x, before, last, least)
        found = pool(padded, kernel, strides, 0, dilations, False, node.wants(1))
    if not node.wants(1):
        return found.to(own)
    values, places = found
    if not simple:
        places = _unpadded(places, list(padded.shape[2:]), before, list(x.shape[2:]))
    if node.get("storage_order", 0):
        places = _column_major(places, list(x.shape[2:]))
    plane = torch.arange(x.shape[0] * x.shape[1]).reshape(x.shape[0], x.shape[1], *[1] * len(kernel))
    return values.to(own), places + plane * prod(x.shape[2:])


def _coordinates(places: Tensor, sizes: list[Any]) -> list[Tensor]:
    found = []
    for size in reversed(sizes):
        found.append(places % size)
        places = places // size
    return found[::-1]


def _unpadded(places: Tensor, padded: list[Any], before: list[Any], sizes: list[Any]) -> Tensor:
    result: Any = 0
    for at, b, size in zip(_coordinates(places, padded), before, sizes, strict=True):
        result = result * size + (at - b)
    return result  # type: ignore[no-any-return]


def _column_major(places: Tensor, sizes: list[Any]) -> Tensor:
    result: Any = 0
    for at, size in reversed(list(zip(_coordinates(places, sizes), sizes, strict=True))):
        result = result * size + at
    return result  # type: ignore[no-any-return]


def _windows_summed(node: Node, x: Tensor, kernel: list[int]) -> Tensor:
    """Sum each window of padded data [N, C, …]; dilated ones by a convolution with ones."""
    strides, dilations = _window(node, len(kernel))
    dims = _dimensions(len(kernel))
    if all(d == 1 for d in dilations):
        return _AVERAGE_POOLS[dims](x, kernel, strides) * prod(kernel)
    ones = torch.ones(1, 1, *kernel, dtype=x.dtype)
    planes = x.reshape(-1, 1, *x.shape[2:])
    found = _CONVS[dims](planes, ones, None, strides, 0, dilations)
    return found.reshape(*x.shape[:2], *found.shape[2:])


@operator("AveragePool")
def average_pool(node: Node, x: Tensor) -> Tensor:
    kernel = list(node.get("kernel_shape"))
    strides, dilations = _window(node, len(kernel))
    before, after, more = _pool_paddings(node, list(x.shape[2:]), kernel)
    counted = bool(node.get("count_include_pad", 0))
    plain = _even(before, after) and all(is_static(m) and m == 0 for m in more)
    if (
        plain
        and all(d == 1 for d in dilations)
        and all(2 * b <= k for b, k in zip(before, kernel, strict=True))
    ):
        return _AVERAGE_POOLS[_dimensions(len(kernel))](x, kernel, strides, before, False, counted)
    last = [a + m for a, m in zip(after, more, strict=True)]
    total = _windows_summed(node, pad_space(x, before, last), kernel)
    ones = torch.ones(1, 1, *x.shape[2:], dtype=x.dtype)
    ones = pad_space(ones, before, after, 1.0 if counted else 0.0)
    ones = pad_space(ones, [0] * len(kernel), more)
    return total / _windows_summed(node, ones, kernel)


@operator("LpPool")
def lp_pool(node: Node, x: Tensor) -> Tensor:
    kernel, p = list(node.get("kernel_shape")), node.get("p", 2)
    before, after, more = _pool_paddings(node, list(x.shape[2:]), kernel)
    last = [a + m for a, m in zip(after, more, strict=True)]
    total = _windows_summed(node, pad_space(x.abs() ** p, before, last), kernel)
    return total ** (1.0 / p)


@operator("GlobalAveragePool")
def global_average_pool(node: Node, x: Tensor) -> Tensor:
    return x.mean(list(range(2, x.dim())), keepdim=True)


@operator("GlobalMaxPool")
def global_max_pool(node: Node, x: Tensor) -> Tensor:
    return x.amax(list(range(2, x.dim())), keepdim=True)


@operator("GlobalLpPool")
def global_lp_pool(node: Node, x: Tensor) -> Tensor:
    p = node.get("p", 2)
    return (x.abs() ** p).sum(list(range(2, x.dim())), keepdim=True) ** (1.0 / p)


@operator("MaxUnpool", sizes=(2,))
def max_unpool(node: Node, x: Tensor, places: Tensor, wanted: list[Any] | None = None) -> Tensor:
    kernel = list(node.get("kernel_shape"))
    strides, _ = _window(node, len(kernel))
    pads = list(node.get("pads") or [0] * (2 * len(kernel)))
    natural = [
        (n - 1) * s + k - pads[i] - pads[i + len(kernel)]
        for i, (n, s, k) in enumerate(zip(x.shape[2:], strides, kernel, strict=True))
    ]
    shape = [*x.shape[:2], *natural]
    flat = torch.zeros(prod(shape), dtype=x.dtype).scatter(0, places.reshape(-1), x.reshape(-1))
    found = flat.reshape(shape)
    if wanted is None:
        return found
    return pad_space(found, [0] * len(kernel), [w - n for w, n in zip(wanted[2:], natural, strict=True)])
