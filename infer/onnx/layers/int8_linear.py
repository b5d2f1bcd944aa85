"""int8 linear layers as ONNX operators: x float [..., K] · codes int8 [N, K] · scale float [N] → [..., N].

ONNX Runtime multiplies integers where `weights` is "blocks"; where it is "float" weights are decoded once, when the
session is created, and activations stay float: exact, and on CPUs without VNNI often faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from ...errors import NotUsableError
from ..graph_builder import GraphBuilder, data
from .int8_operands import (
    FLOAT,
    Target,
    Weights,
    add_bias,
    as_float,
    decoded,
    dequantized,
    fake_quantized,
    float_type,
    floats,
    folded,
    inputs,
    is_positive,
    packed,
    token_scale,
)

if TYPE_CHECKING:
    import onnx_ir as ir

Form = Literal["token", "tensor"]
SMALLEST_TRT_GEMM = 16  # TensorRT runs int8 GEMMs with a smaller K or N slower than in float


def dynamic(emit: GraphBuilder, target: Target, form: Form, weights: Weights) -> tuple[ir.Value, str]:
    """Write a linear layer with activation scales computed at run time, per token or per tensor.

    When the tensor shares a scale, one token of large values costs all others their precision: on MiniLM the
    error of `tensor` is twice that of `token`, beyond what int8 may cost. ONNX Runtime fuses `tensor` into
    one DynamicQuantizeMatMul, which is 1.2 times faster over the whole model.
    """
    if target == "trt":
        raise NotUsableError(
            "TensorRT has no dynamic int8", where=emit.prefix, hint="Use --quant int8:static with --data"
        )
    x, codes, scale, bias = inputs(emit, 4)
    if weights == "float":
        return _in_float(emit, target, x, codes, scale, bias)
    x, restore = as_float(emit, x, target)
    dtype = float_type(emit, target)
    weight, zero = packed(emit, codes, target)
    columns = floats(emit, scale, dtype)
    if form == "tensor":
        quantized, x_scale, x_zero = emit("DynamicQuantizeLinear", x, num_outputs=3)
        product = emit("Cast", emit("MatMulInteger", quantized, weight, x_zero, zero), to=1)
        y = emit("Mul", product, emit("Mul", x_scale, columns))
    else:
        x_scale, middle = token_scale(emit, x), emit.scalar(128, np.uint8)
        quantized = emit("QuantizeLinear", emit("Div", x, x_scale), emit.scalar(1.0), middle)
        product = emit("Cast", emit("MatMulInteger", quantized, weight, middle, zero), to=1)
        y = emit("Mul", emit("Mul", product, columns), x_scale)
    return restore(add_bias(emit, y, bias, dtype)), f"dynamic int8, a scale per {form}"


def static(emit: GraphBuilder, target: Target, form: Form, weights: Weights) -> tuple[ir.Value, str]:
    """Write a linear layer with one stored activation scale (symmetric: zero stays exact)."""
    x, codes, scale, x_scale, bias = inputs(emit, 5)
    if weights == "float" and target != "trt":
        return _in_float(emit, target, x, codes, scale, bias)
    x, restore = as_float(emit, x, target)
    dtype = float_type(emit, target)
    step = float(data(x_scale, emit.node).reshape(-1)[0])
    if target == "trt":
        if min(codes.shape) < SMALLEST_TRT_GEMM:
            y, taken = (
                emit("MatMul", x, decoded(emit, codes, scale, dtype)),
                "layer in float, too small for int8",
            )
        else:
            weight = dequantized(emit, codes, scale, dtype)
            y, taken = emit("MatMul", fake_quantized(emit, x, step, dtype), weight), "static int8"
        return restore(add_bias(emit, y, bias, dtype)), taken
    weight, zero = packed(emit, codes, target)
    step, middle = (step * 127 / 255, 0) if is_positive(x) else (step, 128)
    x_zero = emit.scalar(middle, np.uint8)
    quantized = emit("QuantizeLinear", x, emit.scalar(step), x_zero)
    product = emit("Cast", emit("MatMulInteger", quantized, weight, x_zero, zero), to=1)
    columns = emit.constant(f"{emit.prefix}/scale", (data(scale, emit.node) * step).astype(np.float32))
    return restore(add_bias(emit, emit("Mul", product, columns), bias, dtype)), "static int8"


def weight_only(emit: GraphBuilder, target: Target, form: Form, weights: Weights) -> tuple[ir.Value, str]:
    """Write a linear layer with a weight that is int8 in the file, and a float product."""
    return _in_float(emit, target, *inputs(emit, 4))


def _in_float(
    emit: GraphBuilder, target: Target, x: ir.Value, codes: ir.Value, scale: ir.Value, bias: ir.Value | None
) -> tuple[ir.Value, str]:
    x, restore = as_float(emit, x, target)
    dtype = float_type(emit, target)
    array = np.ascontiguousarray(data(codes, emit.node).T)
    weight = folded(emit, f"{codes.name}/s8", array, floats(emit, scale, dtype, (1, -1)), dtype)
    return restore(add_bias(emit, emit("MatMul", x, weight), bias, dtype)), FLOAT
