"""int8 layers as operators of ONNX Runtime.

Linear: x float [..., K] · codes int8 [N, K] · scale float [N] → [..., N]. Integers are multiplied where `weights` is
"blocks"; where it is "float" weights are decoded once, when the session is created, and activations stay float: exact,
and on CPUs without VNNI often faster.

Convolutions: x float [B, C, H, W] · codes int8 [O, C/g, kh, kw] · scale float [O]. Only what becomes QLinearConv is
computed in int8, which needs the scale of the *output* too: it is taken from the next quantized layer. ConvInteger was
measured 1.2 to 9 times slower than a float Conv, so where no output scale is known the convolution is float, with
weights that are int8 in the file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from infer.onnx.layers.operands import (
    KEEP_VALUES,
    Weights,
    add_bias,
    as_float,
    conv_options,
    float_product,
    floats,
    folded,
    inputs,
)
from infer.onnx.rewrite import GraphBuilder, data

if TYPE_CHECKING:
    import onnx_ir as ir

Signs = Literal["ort-u8u8", "ort-u8s8"]  # of the activations, then of the weights
AXES_AS_INPUT = 18  # the opset in which ReduceMax takes its axes as an input
# Forms of layers, as findings name them.
DYNAMIC, STATIC = "dynamic int8, a scale per token", "static int8"
STATIC_CONV = "static int8 convolution"
FORM_KEY = "infer.int8"  # metadata of a written model: the signs its int8 layers were written for


def packed(emit: GraphBuilder, codes: ir.Value, signs: Signs) -> tuple[ir.Value, ir.Value]:
    """Return codes int8 [N, K] as the [K, N] operand of MatMulInteger, and its zero point."""
    if signs == "ort-u8s8":
        array = np.ascontiguousarray(data(codes, emit.node).T)
        return emit.constant(f"{codes.name}/s8", array), emit.scalar(0, np.int8)
    array = np.ascontiguousarray(flipped(data(codes, emit.node)).T)
    return emit.constant(f"{codes.name}/u8", array), emit.scalar(128, np.uint8)


def flipped(codes: np.ndarray) -> np.ndarray:
    """Convert int8 with zero point 0 to uint8 with zero point 128, or back, by flipping the sign bit."""
    other = np.uint8 if codes.dtype == np.int8 else np.int8
    return (codes.view(np.uint8) ^ np.uint8(128)).view(other)


def bits_of_codes(codes: ir.Value) -> str:
    """Name weights by what the file holds: `int8 weights`, `fp16 weights`."""
    import onnx_ir as ir

    return "fp16 weights" if codes.dtype == ir.DataType.FLOAT16 else "int8 weights"


def token_scale(emit: GraphBuilder, x: ir.Value) -> ir.Value:
    """Compute absmax / 127 of every row of x [..., K], float32 [..., 1]; a tiny number for zero rows."""
    if emit.opset >= AXES_AS_INPUT:
        axes = emit.constant("const/last_axis", np.array([-1], np.int64))
        largest = emit("ReduceMax", emit("Abs", x), axes, keepdims=1)
    else:
        largest = emit("ReduceMax", emit("Abs", x), axes=[-1], keepdims=1)
    return emit("Div", emit("Max", largest, emit.scalar(1e-30)), emit.scalar(127.0))


def is_positive(value: ir.Value) -> bool:
    """Return true if a value comes out of a Relu, so that an unsigned grid can use its whole range."""
    node: Any = value.producer()
    while node is not None and node.op_type in KEEP_VALUES:
        node = node.inputs[0].producer()
    return node is not None and node.op_type == "Relu"


def dynamic(emit: GraphBuilder, signs: Signs, weights: Weights) -> tuple[ir.Value, str]:
    """Write a linear layer with activation scales computed at run time, per token.

    When all tokens share a scale, one of large values costs the others their precision: on MiniLM the error doubles,
    beyond what int8 may cost.
    """
    x, codes, scale, bias = inputs(emit, 4)
    if weights == "float":
        return float_product(emit, x, codes, scale, bias)
    x, restore = as_float(emit, x)
    weight, zero = packed(emit, codes, signs)
    columns = floats(emit, scale)
    x_scale, middle = token_scale(emit, x), emit.scalar(128, np.uint8)
    quantized = emit("QuantizeLinear", emit("Div", x, x_scale), emit.scalar(1.0), middle)
    product = emit("Cast", emit("MatMulInteger", quantized, weight, middle, zero), to=1)
    y = emit("Mul", emit("Mul", product, columns), x_scale)
    return restore(add_bias(emit, y, bias)), DYNAMIC


def static(emit: GraphBuilder, signs: Signs, weights: Weights) -> tuple[ir.Value, str]:
    """Write a linear layer with one stored activation scale (symmetric: zero stays exact)."""
    x, codes, scale, x_scale, bias = inputs(emit, 5)
    if weights == "float":
        return float_product(emit, x, codes, scale, bias)
    x, restore = as_float(emit, x)
    step = float(data(x_scale, emit.node).reshape(-1)[0])
    weight, zero = packed(emit, codes, signs)
    step, middle = (step * 127 / 255, 0) if is_positive(x) else (step, 128)
    x_zero = emit.scalar(middle, np.uint8)
    quantized = emit("QuantizeLinear", x, emit.scalar(step), x_zero)
    product = emit("Cast", emit("MatMulInteger", quantized, weight, x_zero, zero), to=1)
    columns = emit.constant(f"{emit.prefix}/scale", (data(scale, emit.node) * step).astype(np.float32))
    return restore(add_bias(emit, emit("Mul", product, columns), bias)), STATIC


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
        return restore(_on_grid(emit, y, next_step, positive=positive)), STATIC_CONV
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
