"""Operands of quantized layers: what each library that reads a file writes in the same way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from ...kernels.ops.coded_weight import LUT, CodedWeight, layout_of
from ..rewrite import GraphBuilder, data

if TYPE_CHECKING:
    import onnx_ir as ir

# What a layer computes with: its codes, or weights decoded before the first call.
Weights = Literal["blocks", "float"]
FLOAT = "layer in float, decoded when the session is created"
KEEP_VALUES = ("MaxPool", "Flatten", "Reshape")  # operators whose results are among their inputs
FLOAT32: np.dtype[Any] = np.dtype(np.float32)
_ZERO = 8  # the code that stands for zero, of 16


def inputs(emit: GraphBuilder, count: int) -> list[Any]:
    """Return the node's inputs padded with None to `count`, for unpacking."""
    values = list(emit.node.inputs)
    return values + [None] * (count - len(values))


def as_float(emit: GraphBuilder, x: ir.Value) -> tuple[ir.Value, Callable[[ir.Value], ir.Value]]:
    """Cast `x` to float32 and return the cast back to its dtype."""
    import onnx_ir as ir

    if x.dtype in (None, ir.DataType.FLOAT):
        return x, lambda value: value
    dtype = int(x.dtype)
    return emit("Cast", x, to=1), lambda value: emit("Cast", value, to=dtype)


def floats(
    emit: GraphBuilder,
    value: ir.Value,
    dtype: np.dtype[Any] = FLOAT32,
    shape: tuple[int, ...] | None = None,
) -> ir.Value:
    """Return a stored vector in another float dtype, reshaped to `shape` when given."""
    array = data(value, emit.node).astype(dtype)
    array = array if shape is None else array.reshape(shape)
    return emit.constant(f"{value.name}/{dtype.name}/{'x'.join(map(str, array.shape))}", array)


def add_bias(
    emit: GraphBuilder, y: ir.Value, bias: ir.Value | None, dtype: np.dtype[Any] = FLOAT32
) -> ir.Value:
    """Add a bias [N] to `y`."""
    return y if bias is None else emit("Add", y, floats(emit, bias, dtype))


def folded(emit: GraphBuilder, name: str, codes: np.ndarray, scale: ir.Value) -> ir.Value:
    """Return codes · scale as Cast, Mul: codes in the file, folded to float32 once when the session is created.

    A DequantizeLinear of constants is not folded by ONNX Runtime: it would run at every call.
    """
    return emit("Mul", emit("Cast", emit.constant(name, codes), to=1), scale)  # type: ignore[no-any-return]


def float_product(
    emit: GraphBuilder, x: ir.Value, codes: ir.Value, scale: ir.Value, bias: ir.Value | None
) -> tuple[ir.Value, str]:
    """Write x float [..., K] times codes [N, K] · scale [N] as a float product: the codes are in the file alone."""
    x, restore = as_float(emit, x)
    array = np.ascontiguousarray(data(codes, emit.node).T)
    weight = folded(emit, f"{codes.name}/s8", array, floats(emit, scale, shape=(1, -1)))
    return restore(add_bias(emit, emit("MatMul", x, weight), bias)), FLOAT


def conv_options(node: ir.Node) -> dict[str, Any]:
    """Return the attributes of a Conv in place of a node `infer::conv2d_…`."""
    read = {key: list(node.attributes[key].as_ints()) for key in ("stride", "padding", "dilation")}
    return {
        "strides": read["stride"],
        "pads": read["padding"] * 2,
        "dilations": read["dilation"],
        "group": node.attributes["groups"].as_int(),
    }


def uniform_step(table: np.ndarray) -> float | None:
    """Return the spacing of a table [1, 16] equal to `step * (-8 … 7)`; None for any other."""
    if table.shape != (1, 2 * _ZERO):
        return None
    step = float(table[0, 0]) / -_ZERO
    uniform = np.allclose(table[0], step * np.arange(-_ZERO, _ZERO), rtol=1e-6, atol=0)
    return step if step > 0 and uniform else None


def group_of_any_table(tensors: Mapping[str, torch.Tensor]) -> int | None:
    """Return the columns that share a scale in a packed weight whose table is not evenly spaced; None for others."""
    if layout_of(tensors) != LUT or uniform_step(tensors["table"].float().numpy()) is not None:
        return None
    return CodedWeight.of(tensors).group
