"""Quantized operators: Q/DQ, dynamic quantization, integer products, QLinear…, 4-bit weights of com.microsoft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import convolution
from .elementwise import to_type
from .operators import MICROSOFT, Node, operator
from .values import NARROW, Unsupported, number_of, torch_dtype


def _along(scale: Tensor, x: Tensor, axis: int, block: int) -> Tensor:
    """Shape a scale so that it broadcasts: one for all, for each place of `axis`, or for blocks along it."""
    if block:
        axis = axis % x.dim()
        return scale.repeat_interleave(block, axis).narrow(axis, 0, x.shape[axis])
    if scale.dim() == 0 or scale.numel() == 1 and scale.dim() <= 1:
        return scale.reshape(())
    shape = [1] * x.dim()
    shape[axis] = -1
    return scale.reshape(shape)


@operator("DequantizeLinear")
@operator("DequantizeLinear", domain=MICROSOFT)
def dequantize(node: Node, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    axis, block = node.get("axis", 1), node.get("block_size", 0)
    dtype = node.dtype("output_dtype", scale.dtype) if node.get("output_dtype", 0) else scale.dtype
    wide = x.to(torch.int32) if not x.is_floating_point() else x.float()
    if zero is not None:
        wide = wide - _along(zero.to(wide.dtype), x, axis, block)
    product = wide.to(torch.float32) * _along(scale.to(torch.float32), x, axis, block)
    return product.to(dtype)


@operator("QuantizeLinear")
@operator("QuantizeLinear", domain=MICROSOFT)
def quantize(node: Node, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    axis, block = node.get("axis", 1), node.get("block_size", 0)
    number = node.get("output_dtype", 0)
    if not number:
        number = 2 if zero is None else node.types.get(2, number_of(zero.dtype))
    spread = x.to(torch.float32) / _along(scale.to(torch.float32), x, axis, block)
    if torch_dtype(number).is_floating_point:
        return to_type(spread, number, bool(node.get("saturate", 1)))
    codes = torch.round(spread)
    if zero is not None:
        codes = codes + _along(zero.to(torch.float32), x, axis, block)
    info = torch.iinfo(torch_dtype(number))
    low, high = NARROW.get(number, (info.min, info.max))
    return codes.clamp(low, high).to(torch.int32).to(torch_dtype(number))


@operator("DynamicQuantizeLinear")
def dynamic_quantize(node: Node, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize to uint8 over the range of the data, 0 included."""
    zero = torch.zeros((), dtype=x.dtype)
    low, high = torch.minimum(x.amin(), zero), torch.maximum(x.amax(), zero)
    scale = (high - low) / 255
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)
    point = torch.round(torch.clamp(-low / safe, 0, 255))
    codes = torch.clamp(torch.round(x / safe) + point, 0, 255)
    return codes.to(torch.uint8), scale, point.to(torch.uint8)


def _centred(x: Tensor, zero: Tensor | None, axis: int) -> Tensor:
    """Subtract a zero point; codes become float64, in which sums of their products are exact."""
    wide = x.to(torch.float64)
    if zero is None:
        return wide
    zero = zero.to(torch.float64)
    if zero.dim() == 1 and zero.numel() > 1:
        shape = [1] * x.dim()
        shape[axis] = -1
        zero = zero.reshape(shape)
    elif zero.dim() <= 1:
        zero = zero.reshape(())
    return wide - zero


@operator("MatMulInteger")
def matmul_integer(
    node: Node, a: Tensor, b: Tensor, a_zero: Tensor | None = None, b_zero: Tensor | None = None
) -> Tensor:
    rows = -2 if a.dim() > 1 else -1
    return torch.matmul(_centred(a, a_zero, rows), _centred(b, b_zero, -1)).to(torch.int32)


@operator("ConvInteger")
def conv_integer(
    node: Node, x: Tensor, w: Tensor, x_zero: Tensor | None = None, w_zero: Tensor | None = None
) -> Tensor:
    return convolution.conv(node, _centred(x, x_zero, 0), _centred(w, w_zero, 0)).round().to(torch.int32)


def _requantized(value: Tensor, scale: Tensor, zero: Tensor | None, like: torch.dtype) -> Tensor:
    info = torch.iinfo(like)
    point: Any = 0 if zero is None else zero.to(torch.float32).reshape(())
    codes = torch.round(value / scale.to(torch.float32).reshape(())) + point
    return codes.clamp(info.min, info.max).to(torch.int32).to(like)


@operator("QLinearMatMul")
def qlinear_matmul(
    node: Node, a: Tensor, a_scale: Tensor, a_zero: Tensor, b: Tensor, b_scale: Tensor, b_zero: Tensor,
    y_scale: Tensor, y_zero: Tensor,
) -> Tensor:  # fmt: skip
    total = torch.matmul(_centred(a, a_zero, -2), _centred(b, b_zero, -1))
    a_scale = (
        a_scale.reshape(*a_scale.shape, 1)
        if a_scale.dim() == 1 and a_scale.numel() > 1
        else a_scale.reshape(())
    )
    b_scale = b_scale if b_scale.numel() > 1 else b_scale.reshape(())
    factor = a_scale.to(torch.float32) * b_scale.to(torch.float32) / y_scale.to(torch.float32).reshape(())
    return _requantized(total.to(torch.float32) * factor, torch.ones(()), y_zero, y_zero.dtype)


@operator("QLinearConv")
def qlinear_conv(
    node: Node, x: Tensor, x_scale: Tensor, x_zero: Tensor, w: Tensor, w_scale: Tensor, w_zero: Tensor,
    y_scale: Tensor, y_zero: Tensor, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    total = convolution.conv(node, _centred(x, x_zero, 0), _centred(w, w_zero, 0)).round()
    shape = (1, -1, *[1] * (x.dim() - 2))
    if bias is not None:
        total = total + bias.to(torch.float64).reshape(shape)
    factor = (x_scale.reshape(()) * w_scale.reshape(-1) / y_scale.reshape(())).reshape(shape)
    return _requantized(total.to(torch.float32) * factor, torch.ones(()), y_zero, y_zero.dtype)


@operator("QLinearAdd", "QLinearMul", domain=MICROSOFT)
def qlinear_binary(
    node: Node, a: Tensor, a_scale: Tensor, a_zero: Tensor, b: Tensor, b_scale: Tensor, b_zero: Tensor,
    y_scale: Tensor, y_zero: Tensor | None = None,
) -> Tensor:  # fmt: skip
    x, y = dequantize(_PLAIN, a, a_scale, a_zero), dequantize(_PLAIN, b, b_scale, b_zero)
    return _requantized(x + y if node.op == "QLinearAdd" else x * y, y_scale, y_zero, a.dtype)


_UNARY: dict[str, Callable[[Node, Tensor], Tensor]] = {
    "QLinearSigmoid": lambda node, x: torch.sigmoid(x),
    "QLinearLeakyRelu": lambda node, x: torch.nn.functional.leaky_relu(x, node.get("alpha", 0.01)),
    "QLinearGlobalAveragePool": convolution.global_average_pool,
}


@operator(*_UNARY, domain=MICROSOFT)
def qlinear_unary(
    node: Node, x: Tensor, x_scale: Tensor, x_zero: Tensor, y_scale: Tensor, y_zero: Tensor | None = None
) -> Tensor:
    if node.get("channels_last", 0):
        raise Unsupported("channels last")
    value = dequantize(_PLAIN, x, x_scale, x_zero)
    return _requantized(_UNARY[node.op](node, value), y_scale, y_zero, x.dtype)


@operator("QLinearConcat", domain=MICROSOFT)
def qlinear_concat(node: Node, y_scale: Tensor, y_zero: Tensor, *parts: Tensor) -> Tensor:
    each = [dequantize(_PLAIN, *parts[i : i + 3]) for i in range(0, len(parts), 3)]
    return _requantized(torch.cat(each, node.get("axis")), y_scale, y_zero, y_zero.dtype)


_PLAIN = Node("DequantizeLinear", "", "", 13, (), (), {})


@operator("MatMulIntegerToFloat", domain=MICROSOFT)
def matmul_integer_to_float(
    node: Node, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, a_zero: Tensor | None = None,
    b_zero: Tensor | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    found = matmul_integer(node, a, b, a_zero, b_zero).to(torch.float32) * (a_scale.reshape(()) * b_scale)
    return found if bias is None else found + bias


@operator("DynamicQuantizeMatMul", domain=MICROSOFT)
def dynamic_quantize_matmul(
    node: Node,
    a: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_zero: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    codes, scale, zero = dynamic_quantize(node, a)
    return matmul_integer_to_float(node, codes, b, scale, b_scale, zero, b_zero, bias)


@operator("MatMulNBits", domain=MICROSOFT)
def matmul_nbits(
    node: Node, a: Tensor, b: Tensor, scales: Tensor, zeros: Tensor | None = None, groups: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Multiply by weights of 4 or 8 bits in blocks along the inputs, codes low nibble first."""
    found = torch.matmul(a, nbits_weight(node, b, scales, zeros, groups).to(a.dtype).t())
    return found if bias is None else found + bias


def nbits_weight(
    node: Node, b: Tensor, scales: Tensor, zeros: Tensor | None, groups: Tensor | None
) -> Tensor:
    """Return the float weight [N, K] of a MatMulNBits."""
    bits, n, k, block = node.get("bits", 4), node.get("N"), node.get("K"), node.get("block_size")
    if bits not in (4, 8) or groups is not None:
        raise Unsupported("permuted inputs" if groups is not None else f"{bits} bits")
    blocks = -(-k // block)

    def unpacked(codes: Tensor, count: int) -> Tensor:
        rows = codes.reshape(n, -1)
        if bits == 4:
            rows = torch.stack([rows & 15, rows >> 4], -1).reshape(n, -1)
        return rows[:, :count].float()

    codes = unpacked(b, blocks * block).reshape(n, blocks, block)
    if zeros is None:
        point: Any = float(1 << (bits - 1))
    elif zeros.is_floating_point():
        point = zeros.float().reshape(n, blocks, 1)
    else:
        point = unpacked(zeros, blocks).reshape(n, blocks, 1)
    weight = (codes - point) * scales.float().reshape(n, blocks, 1)
    return weight.reshape(n, -1)[:, :k].contiguous()


@operator("DynamicQuantizeLSTM", domain=MICROSOFT)
def dynamic_quantize_lstm(node: Node, *inputs: Tensor) -> Tensor:
    """Refuse: its rounding of the state at every step is not that of a float LSTM."""
    raise Unsupported("activations quantized within the loop")
