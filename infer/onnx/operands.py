"""The operands of int8 layers: weights packed or decoded, activations quantized."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .emit import Emit, data

if TYPE_CHECKING:
    import onnx_ir as ir

Target = Literal["ort-u8u8", "ort-u8s8", "trt"]


def inputs(emit: Emit, count: int) -> list[Any]:
    """The node's inputs as values, absent ones as None, so that they can be unpacked."""
    given = list(emit.node.inputs)
    return given + [None] * (count - len(given))


def as_float(emit: Emit, x: ir.Value) -> tuple[ir.Value, Callable[[ir.Value], ir.Value]]:
    """`x` as float32 and the cast that brings a result back to the dtype of `x`."""
    import onnx_ir as ir

    if x.dtype in (None, ir.DataType.FLOAT):
        return x, lambda value: value
    dtype = int(x.dtype)
    return emit("Cast", x, to=1), lambda value: emit("Cast", value, to=dtype)


def add_bias(
    emit: Emit, y: ir.Value, bias: ir.Value | None, shape: tuple[int, ...] | None = None
) -> ir.Value:
    """`y` plus a bias [N], reshaped to broadcast when `shape` is given and brought to float32."""
    if bias is None:
        return y
    array = data(bias, emit.node).astype(np.float32)
    name = f"{bias.name}/float" if shape is None else f"{bias.name}/{'x'.join(map(str, shape))}"
    return emit("Add", y, emit.constant(name, array if shape is None else array.reshape(shape)))


def packed(emit: Emit, codes: ir.Value, target: Target) -> tuple[ir.Value, ir.Value]:
    """codes int8 [N, K] as the [K, N] operand of MatMulInteger, and its zero point."""
    if target == "ort-u8s8":
        array = np.ascontiguousarray(data(codes, emit.node).T)
        return emit.constant(f"{codes.name}/s8", array), emit.scalar(0, np.int8)
    array = np.ascontiguousarray(unsigned(data(codes, emit.node)).T)
    return emit.constant(f"{codes.name}/u8", array), emit.scalar(128, np.uint8)


def unsigned(codes: np.ndarray) -> np.ndarray:
    """int8 codes as uint8 with zero point 128: the sign bit flipped."""
    return codes.view(np.uint8) ^ np.uint8(128)


def dequantized(emit: Emit, codes: ir.Value, scale: ir.Value) -> ir.Value:
    """codes int8 [N, K] · scale [N] as a float [K, N] operand that is int8 in the file."""
    array = np.ascontiguousarray(data(codes, emit.node).T)
    columns = emit.constant(f"{codes.name}/scale", data(scale, emit.node).astype(np.float32))
    zeros = emit.constant(f"{codes.name}/zero", np.zeros(array.shape[1], np.int8))
    return emit("DequantizeLinear", emit.constant(f"{codes.name}/s8", array), columns, zeros, axis=1)


def fake_quantized(emit: Emit, x: ir.Value, step: float) -> ir.Value:
    """`x` through a pair QuantizeLinear, DequantizeLinear: symmetric int8, one scale for the tensor."""
    scale, zero = emit.scalar(step), emit.scalar(0, np.int8)
    return emit("DequantizeLinear", emit("QuantizeLinear", x, scale, zero), scale, zero)


def token_scale(emit: Emit, x: ir.Value) -> ir.Value:
    """Absmax / 127 of every row of x [..., K], float32 [..., 1]; for a row of zeros a tiny number."""
    axes = emit.constant("const/last_axis", np.array([-1], np.int64))
    largest = emit("ReduceMax", emit("Abs", x), axes, keepdims=1)
    return emit("Div", emit("Max", largest, emit.scalar(1e-30)), emit.scalar(127.0))
