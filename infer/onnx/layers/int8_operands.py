"""Operands of int8 layers: weights packed or decoded, activations quantized.

ONNX Runtime gets float32 around its integers. TensorRT computes in the dtype of the activations, so for it
scales and biases have that dtype too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..graph_builder import GraphBuilder, data

if TYPE_CHECKING:
    import onnx_ir as ir

Target = Literal["ort-u8u8", "ort-u8s8", "trt"]
# What a layer computes with: its codes, or weights decoded before the first call.
Weights = Literal["blocks", "float"]
FLOAT = "layer in float, decoded when the session is created"
KEEP_VALUES = ("MaxPool", "Flatten", "Reshape")  # operators whose results are among their inputs
AXES_AS_INPUT = 18  # the opset in which ReduceMax takes its axes as an input
FORM_KEY = "infer.int8"  # metadata of a written model: the target its int8 layers were written for


def inputs(emit: GraphBuilder, count: int) -> list[Any]:
    """Return the node's inputs padded with None to `count`, for unpacking."""
    given = list(emit.node.inputs)
    return given + [None] * (count - len(given))


def as_float(
    emit: GraphBuilder, x: ir.Value, target: Target
) -> tuple[ir.Value, Callable[[ir.Value], ir.Value]]:
    """Cast `x` to float32 and return the cast back to its dtype; for TensorRT `x` stays."""
    import onnx_ir as ir

    if target == "trt" or x.dtype in (None, ir.DataType.FLOAT):
        return x, lambda value: value
    dtype = int(x.dtype)
    return emit("Cast", x, to=1), lambda value: emit("Cast", value, to=dtype)


def float_type(emit: GraphBuilder, target: Target) -> np.dtype[Any]:
    """Return the dtype of scales and biases around this node."""
    x = emit.node.inputs[0]
    return np.dtype(np.float32 if target != "trt" or x is None or x.dtype is None else x.dtype.numpy())


def floats(
    emit: GraphBuilder, value: ir.Value, dtype: np.dtype[Any], shape: tuple[int, ...] | None = None
) -> ir.Value:
    """Return a stored vector in another float dtype, reshaped to `shape` when given."""
    array = data(value, emit.node).astype(dtype)
    array = array if shape is None else array.reshape(shape)
    return emit.constant(f"{value.name}/{dtype.name}/{'x'.join(map(str, array.shape))}", array)


def add_bias(
    emit: GraphBuilder,
    y: ir.Value,
    bias: ir.Value | None,
    dtype: np.dtype[Any],
    shape: tuple[int, ...] | None = None,
) -> ir.Value:
    """Add a bias [N] to `y`, reshaped to broadcast when `shape` is given."""
    return y if bias is None else emit("Add", y, floats(emit, bias, dtype, shape))


def packed(emit: GraphBuilder, codes: ir.Value, target: Target) -> tuple[ir.Value, ir.Value]:
    """Return codes int8 [N, K] as the [K, N] operand of MatMulInteger, and its zero point."""
    if target == "ort-u8s8":
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


def folded(
    emit: GraphBuilder, name: str, codes: np.ndarray, scale: ir.Value, dtype: np.dtype[Any]
) -> ir.Value:
    """Return codes · scale as Cast, Mul: codes in the file, folded to float once when the session is created.

    A DequantizeLinear of constants is not folded by ONNX Runtime: it would run at every call.
    """
    import onnx_ir as ir

    integers = emit.constant(name, codes)
    return emit("Mul", emit("Cast", integers, to=int(ir.DataType.from_numpy(dtype))), scale)


def fake_quantized(emit: GraphBuilder, x: ir.Value, step: float, dtype: np.dtype[Any]) -> ir.Value:
    """Pass `x` through QuantizeLinear and DequantizeLinear: symmetric int8, one scale for the tensor."""
    scale, zero = emit.scalar(step, dtype), emit.scalar(0, np.int8)
    return emit("DequantizeLinear", emit("QuantizeLinear", x, scale, zero), scale, zero)


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
