"""Operands of quantized layers in TensorRT, which computes in the dtype of the activations: scales have it too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from infer.onnx.layers.operands import floats
from infer.onnx.rewrite import GraphBuilder, data

if TYPE_CHECKING:
    import onnx_ir as ir


def float_type(emit: GraphBuilder) -> np.dtype[Any]:
    """Return the dtype of scales and biases around this node."""
    x = emit.node.inputs[0]
    return np.dtype(np.float32 if x is None or x.dtype is None else x.dtype.numpy())


def dequantized(
    emit: GraphBuilder, codes: ir.Value, scale: ir.Value, dtype: np.dtype[Any], *, transposed: bool = False
) -> ir.Value:
    """Return codes int8 [N, …] · scale [N] as a float operand, [K, N] where `transposed`, stored as int8."""
    array = data(codes, emit.node)
    zeros = emit.constant(f"{codes.name}/zero", np.zeros(len(array), np.int8))
    weight = emit.constant(f"{codes.name}/s8", np.ascontiguousarray(array.T if transposed else array))
    return emit("DequantizeLinear", weight, floats(emit, scale, dtype), zeros, axis=int(transposed))


def decoded(
    emit: GraphBuilder, codes: ir.Value, scale: ir.Value, dtype: np.dtype[Any], *, transposed: bool = False
) -> ir.Value:
    """Return the operand that `dequantized` returns, stored as float."""
    array = data(codes, emit.node).astype(np.float32)
    weight = array * data(scale, emit.node).astype(np.float32).reshape(-1, *[1] * (array.ndim - 1))
    stored = np.ascontiguousarray((weight.T if transposed else weight).astype(dtype))
    return emit.constant(f"{codes.name}/{dtype.name}", stored)


def fake_quantized(emit: GraphBuilder, x: ir.Value, step: float, dtype: np.dtype[Any]) -> ir.Value:
    """Pass `x` through QuantizeLinear and DequantizeLinear: symmetric int8, one scale for the tensor."""
    scale, zero = emit.scalar(step, dtype), emit.scalar(0, np.int8)
    return emit("DequantizeLinear", emit("QuantizeLinear", x, scale, zero), scale, zero)
