"""int8 convolutions for TensorRT: on quantized activations, or in float with weights that stay int8."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infer.onnx.layers.operands import Weights, conv_options, floats, inputs
from infer.onnx.rewrite import GraphBuilder, data

from .operands import decoded, dequantized, fake_quantized, float_type

if TYPE_CHECKING:
    import onnx_ir as ir

SMALLEST = 16  # channels


def conv(emit: GraphBuilder, weights: Weights) -> tuple[ir.Value, str]:
    """Write a dynamic, weight-only or static convolution, by the node's operator.

    The weights of a float convolution stay int8 in the engine, unless `weights` is "float".
    """
    is_static = emit.node.op_type.endswith("static")
    x, codes, scale, *rest = inputs(emit, 6 if is_static else 4)
    bias, dtype, options = rest[1 if is_static else 0], float_type(emit), conv_options(emit.node)
    bias_value = None if bias is None else floats(emit, bias, dtype)
    channels = min(codes.shape[0], codes.shape[1] * options["group"])
    if is_static and channels >= SMALLEST:
        step = float(data(rest[0], emit.node).reshape(-1)[0])
        weight, taken = dequantized(emit, codes, scale, dtype), "static int8 convolution"
        x = fake_quantized(emit, x, step, dtype)
    elif weights == "blocks":
        weight, taken = dequantized(emit, codes, scale, dtype), "convolution in float, int8 weights packed"
    else:
        weight, taken = decoded(emit, codes, scale, dtype), "convolution in float, decoded when built"
    return emit("Conv", x, weight, bias_value, **options), taken
