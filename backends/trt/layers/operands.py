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


def dequantized(emit: GraphBuilder, codes: ir.Value, scale: ir.Value, dtype: np.dtype[Any]) -> ir.Value:
    """Return codes int8 [N, K] · scale [N] as a float [K, N] operand, stored as int8."""
    array = np.ascontiguousarray(data(codes, emit.node).T)
    zeros = emit.constant(f"{codes.name}/zero", np.zeros(array.shape[1], np.int8))
    weight = emit.constant(f"{codes.name}/s8", array)
    return emit("DequantizeLinear", weight, floats(emit, scale, dtype), zeros, axis=1)


def decoded(emit: GraphBuilder, codes: ir.Value, scale: ir.Value, dtype: np.dtype[Any]) -> ir.Value:
    """Return codes int8 [N, K] · scale [N] as a float [K, N] operand, stored as float."""
    weight = data(codes, emit.node).astype(np.float32) * data(scale, emit.node).astype(np.float32)[:, None]
    return emit.constant(f"{codes.name}/{dtype.name}", np.ascontiguousarray(weight.T.astype(dtype)))


def fake_quantized(emit: GraphBuilder, x: ir.Value, step: float, dtype: np.dtype[Any]) -> ir.Value:
    """Pass `x` through QuantizeLinear and DequantizeLinear: symmetric int8, one scale for the tensor."""
    scale, zero = emit.scalar(step, dtype), emit.scalar(0, np.int8)
    return emit("DequantizeLinear", emit("QuantizeLinear", x, scale, zero), scale, zero)
