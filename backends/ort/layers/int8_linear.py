"""int8 linear layers as operators of ONNX Runtime: x float [..., K] · codes int8 [N, K] · scale float [N] → [..., N].

It multiplies integers where `weights` is "blocks"; where it is "float" weights are decoded once, when the session is
created, and activations stay float: exact, and on CPUs without VNNI often faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from infer.onnx.layers.operands import Weights, add_bias, as_float, float_product, floats, inputs
from infer.onnx.rewrite import GraphBuilder, data

from .int8_operands import Signs, is_positive, packed, token_scale

if TYPE_CHECKING:
    import onnx_ir as ir

DYNAMIC, STATIC = "dynamic int8, a scale per token", "static int8"


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
