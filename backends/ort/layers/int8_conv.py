"""int8 convolutions as operators of ONNX Runtime: x float [B, C, H, W] · codes int8 [O, C/g, kh, kw] · scale float [O].

It computes in int8 only what becomes QLinearConv, which needs the scale of the *output* too: it is taken from the next
quantized layer. ConvInteger was measured 1.2 to 9 times slower than a float Conv, so where no output scale is known the
convolution is float, with weights that are int8 in the file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from infer.onnx.layers.operands import KEEP_VALUES, Weights, as_float, conv_options, floats, folded, inputs
from infer.onnx.rewrite import GraphBuilder, data

from .int8_operands import Signs, bits_of_codes, flipped, is_positive

if TYPE_CHECKING:
    import onnx_ir as ir

STATIC = "static int8 convolution"


def conv(emit: GraphBuilder, signs: Signs, weights: Weights) -> tuple[ir.Value, str]:
    """Write a dynamic, weight-only or static convolution, by the node's operator; with `weights` "float" in float."""
    is_static = emit.node.op_type.endswith("static")
    x, codes, scale, *rest = inputs(emit, 6 if is_static else 4)
    bias, options = rest[1 if is_static else 0], conv_options(emit.node)
    bias_value = None if bias is None else floats(emit, bias)
    next_step = _output_step(emit.node.outputs[0]) if is_static else None
    x, restore = as_float(emit, x)
    if is_static and weights == "blocks" and next_step is not None:
        step = float(data(rest[0], emit.node).reshape(-1)[0])
        weight = _dequantized(emit, signs, codes, scale)
        x_grid = _on_grid(emit, x, step, positive=is_positive(x))
        y = emit("Conv", x_grid, weight, _quantized_bias(emit, scale, bias, x_grid), **options)
        positive = all(user.op_type == "Relu" for user in emit.node.outputs[0].consumers())
        return restore(_on_grid(emit, y, next_step, positive=positive)), STATIC
    y = emit("Conv", x, _decoded(emit, codes, scale), bias_value, **options)
    return restore(y), f"convolution in float, {bits_of_codes(codes)}"


def _on_grid(emit: GraphBuilder, x: ir.Value, step: float, *, positive: bool) -> ir.Value:
    """Quantize `x` to uint8; non-negative values use the whole range."""
    scale = emit.scalar(step * 127 / 255 if positive else step)
    zero = emit.scalar(0 if positive else 128, np.uint8)
    return emit("DequantizeLinear", emit("QuantizeLinear", x, scale, zero), scale, zero)


def _dequantized(emit: GraphBuilder, signs: Signs, codes: ir.Value, scale: ir.Value) -> ir.Value:
    """Return the weight as DequantizeLinear per output channel, unsigned where signed products saturate."""
    array = data(codes, emit.node)
    signed = signs != "ort-u8u8"
    weight = emit.constant(f"{codes.name}/{'s8' if signed else 'u8'}", array if signed else flipped(array))
    zero = np.zeros(len(array), np.int8) if signed else np.full(len(array), 128, np.uint8)
    zeros = emit.constant(f"{codes.name}/zero", zero)
    return emit("DequantizeLinear", weight, floats(emit, scale), zeros, axis=0)


def _decoded(emit: GraphBuilder, codes: ir.Value, scale: ir.Value) -> ir.Value:
    """Return the weight, int8 in the file."""
    array = data(codes, emit.node)
    steps = floats(emit, scale, shape=(-1, *[1] * (array.ndim - 1)))
    return folded(emit, f"{codes.name}/s8", array, steps)


def _quantized_bias(
    emit: GraphBuilder, scale: ir.Value, bias: ir.Value | None, x_grid: ir.Value
) -> ir.Value | None:
    """Return the bias as int32 of scale (activation scale · weight scale), as QLinearConv adds it."""
    if bias is None:
        return None
    quantizer: Any = x_grid.producer()
    x_scale = data(quantizer.inputs[1], emit.node)
    steps = (data(scale, emit.node).astype(np.float64) * x_scale).astype(np.float32)
    values = np.rint(data(bias, emit.node).astype(np.float64) / steps)
    values = values.clip(-(2**31), 2**31 - 1).astype(np.int32)
    constant = emit.constant(f"{emit.prefix}/bias", values)
    zero = emit.constant(f"{emit.prefix}/bias_zero", np.zeros(len(values), np.int32))
    return emit("DequantizeLinear", constant, emit.constant(f"{emit.prefix}/bias_scale", steps), zero, axis=0)


def _output_step(value: ir.Value) -> float | None:
    """Return the activation scale shared by all readers of `value`, through Relu and MaxPool; else None."""
    steps: set[float | None] = set()
    for user in value.consumers():
        if user.op_type in ("conv2d_int8_static", "linear_int8_static"):
            steps.add(float(data(user.inputs[3], user).reshape(-1)[0]))
        elif user.op_type == "Relu" or user.op_type in KEEP_VALUES:
            steps.add(_output_step(user.outputs[0]))
        else:
            steps.add(None)
    return steps.pop() if len(steps) == 1 and not value.is_graph_output() else None
