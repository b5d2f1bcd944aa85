"""int8 linear layers as ONNX operators: x float [..., K] · codes int8 [N, K] · scale float [N] → [..., N]."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from ..errors import NotUsableError
from .emit import Emit, data
from .operands import Target, add_bias, as_float, dequantized, fake_quantized, inputs, packed, token_scale

if TYPE_CHECKING:
    import onnx_ir as ir

Form = Literal["token", "tensor"]
SMALLEST_TRT_GEMM = 16  # TensorRT runs int8 GEMMs with a smaller K or N slower than in float


def dynamic(emit: Emit, target: Target, form: Form) -> tuple[ir.Value, str]:
    """Activation scales found at run time: one for each token, or one for the whole tensor.

    When the tensor shares a scale, one token of large values costs all others their precision: on MiniLM the
    error of `tensor` is twice that of `token`, beyond what int8 may cost. ONNX Runtime fuses `tensor` into
    one DynamicQuantizeMatMul, which is 1.2 times faster over the whole model.
    """
    if target == "trt":
        raise NotUsableError("TensorRT has no dynamic int8", where=emit.prefix, hint="Calibrate it first")
    x, codes, scale, bias = inputs(emit, 4)
    x, restore = as_float(emit, x)
    weight, zero = packed(emit, codes, target)
    columns = emit.constant(f"{codes.name}/scale", data(scale, emit.node).astype(np.float32))
    if form == "tensor":
        quantized, x_scale, x_zero = emit("DynamicQuantizeLinear", x, num_outputs=3)
        product = emit("Cast", emit("MatMulInteger", quantized, weight, x_zero, zero), to=1)
        y = emit("Mul", product, emit("Mul", x_scale, columns))
    else:
        x_scale, middle = token_scale(emit, x), emit.scalar(128, np.uint8)
        quantized = emit("QuantizeLinear", emit("Div", x, x_scale), emit.scalar(1.0), middle)
        product = emit("Cast", emit("MatMulInteger", quantized, weight, middle, zero), to=1)
        y = emit("Mul", emit("Mul", product, columns), x_scale)
    return restore(add_bias(emit, y, bias)), f"dynamic int8, a scale per {form}"


def static(emit: Emit, target: Target, form: Form) -> tuple[ir.Value, str]:
    """One activation scale, known beforehand (symmetric: zero stays exact)."""
    x, codes, scale, x_scale, bias = inputs(emit, 5)
    x, restore = as_float(emit, x)
    step = float(data(x_scale, emit.node).reshape(-1)[0])
    if target == "trt":
        if min(codes.shape) < SMALLEST_TRT_GEMM:
            y, taken = (
                emit("MatMul", x, dequantized(emit, codes, scale)),
                "product in float, too small for int8",
            )
        else:
            y = emit("MatMul", fake_quantized(emit, x, step), dequantized(emit, codes, scale))
            taken = "static int8"
        return restore(add_bias(emit, y, bias)), taken
    weight, zero = packed(emit, codes, target)
    middle = emit.scalar(128, np.uint8)
    quantized = emit("QuantizeLinear", x, emit.scalar(step), middle)
    product = emit("Cast", emit("MatMulInteger", quantized, weight, middle, zero), to=1)
    columns = emit.constant(f"{emit.prefix}/scale", (data(scale, emit.node) * step).astype(np.float32))
    return restore(add_bias(emit, emit("Mul", product, columns), bias)), "static int8"


def weight_only(emit: Emit, target: Target, form: Form) -> tuple[ir.Value, str]:
    """The weight is decoded; the product is float."""
    x, codes, scale, bias = inputs(emit, 4)
    x, restore = as_float(emit, x)
    y = emit("MatMul", x, dequantized(emit, codes, scale))
    return restore(add_bias(emit, y, bias)), "int8 weights, float product"
