"""int8 convolutions as ONNX operators: x float [B, C, H, W] · codes int8 [O, C/g, kh, kw] · scale float [O].

ONNX Runtime computes in int8 only what becomes QLinearConv, which needs the scale of the *output* too: it is
taken from the next quantized layer. ConvInteger was measured 1.2 to 9 times slower than a float Conv, so
where no output scale is known the convolution is float, with weights that are int8 in the file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..graph_builder import GraphBuilder, data
from .int8_operands import (
    KEEP_VALUES,
    Target,
    Weights,
    as_float,
    bits_of_codes,
    flipped,
    float_type,
    floats,
    folded,
    inputs,
    is_positive,
)

if TYPE_CHECKING:
    import onnx_ir as ir

SMALLEST_TRT_CONV = 16  # channels


def conv(emit: GraphBuilder, target: Target, weights: Weights = "blocks") -> tuple[ir.Value, str]:
    """Write a dynamic, weight-only or static convolution, by the node's operator.

    For TensorRT the weights of a float convolution stay int8 in the engine, unless `weights` is "float"; for ONNX
    Runtime then all convolutions are float.
    """
    is_static = emit.node.op_type.endswith("static")
    x, codes, scale, *rest = inputs(emit, 6 if is_static else 4)
    bias, dtype, options = rest[1 if is_static else 0], float_type(emit, target), _options(emit.node)
    bias_value = None if bias is None else floats(emit, bias, dtype)
    next_step = _output_step(emit.node.outputs[0]) if is_static else None
    x, restore = as_float(emit, x, target)
    step = float(data(rest[0], emit.node).reshape(-1)[0]) if is_static else 0.0
    channels = min(codes.shape[0], codes.shape[1] * options["group"])
    if is_static and target == "trt" and channels >= SMALLEST_TRT_CONV:
        weight = _dequantized(emit, target, codes, scale, dtype)
        y = emit("Conv", _on_grid(emit, x, step, target, dtype), weight, bias_value, **options)
        return restore(y), "static int8 convolution"
    if is_static and target != "trt" and weights == "blocks" and next_step is not None:
        weight = _dequantized(emit, target, codes, scale, dtype)
        x_grid = _on_grid(emit, x, step, target, dtype, positive=is_positive(x))
        y = emit("Conv", x_grid, weight, _quantized_bias(emit, scale, bias, x_grid), **options)
        positive = all(user.op_type == "Relu" for user in emit.node.outputs[0].consumers())
        y = _on_grid(emit, y, next_step, target, dtype, positive=positive)
        return restore(y), "static int8 convolution"
    if target == "trt" and weights == "blocks":
        weight = _dequantized(emit, target, codes, scale, dtype)
        y = emit("Conv", x, weight, bias_value, **options)
        return restore(y), "convolution in float, int8 weights packed"
    y = emit("Conv", x, _decoded(emit, target, codes, scale, dtype), bias_value, **options)
    return restore(y), "convolution in float, " + (
        "decoded when built" if target == "trt" else bits_of_codes(codes)
    )


def _options(node: ir.Node) -> dict[str, Any]:
    read = {key: list(node.attributes[key].as_ints()) for key in ("stride", "padding", "dilation")}
    return {
        "strides": read["stride"],
        "pads": read["padding"] * 2,
        "dilations": read["dilation"],
        "group": node.attributes["groups"].as_int(),
    }


def _on_grid(
    emit: GraphBuilder,
    x: ir.Value,
    step: float,
    target: Target,
    dtype: np.dtype[Any],
    *,
    positive: bool = False,
) -> ir.Value:
    """Quantize `x` to int8 (TensorRT) or uint8; non-negative values use the whole range."""
    if target == "trt":
        scale, zero = emit.scalar(step, dtype), emit.scalar(0, np.int8)
    else:
        scale = emit.scalar(step * 127 / 255 if positive else step, dtype)
        zero = emit.scalar(0 if positive else 128, np.uint8)
    return emit("DequantizeLinear", emit("QuantizeLinear", x, scale, zero), scale, zero)


def _dequantized(
    emit: GraphBuilder, target: Target, codes: ir.Value, scale: ir.Value, dtype: np.dtype[Any]
) -> ir.Value:
    """Return the weight as DequantizeLinear per output channel, unsigned where signed products saturate."""
    array = data(codes, emit.node)
    signed = target != "ort-u8u8"
    weight = emit.constant(f"{codes.name}/{'s8' if signed else 'u8'}", array if signed else flipped(array))
    zero = np.zeros(len(array), np.int8) if signed else np.full(len(array), 128, np.uint8)
    zeros = emit.constant(f"{codes.name}/zero", zero)
    return emit("DequantizeLinear", weight, floats(emit, scale, dtype), zeros, axis=0)


def _decoded(
    emit: GraphBuilder, target: Target, codes: ir.Value, scale: ir.Value, dtype: np.dtype[Any]
) -> ir.Value:
    """Return the weight: int8 in the file for ONNX Runtime, float for TensorRT."""
    array = data(codes, emit.node)
    shape = (-1, *[1] * (array.ndim - 1))
    if target == "trt":
        weight = array.astype(np.float32) * data(scale, emit.node).astype(np.float32).reshape(shape)
        return emit.constant(f"{codes.name}/{dtype.name}", weight.astype(dtype))
    return folded(emit, f"{codes.name}/s8", array, floats(emit, scale, dtype, shape), dtype)


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
