"""Operands of int8 layers in ONNX Runtime: signed or unsigned codes, scales of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from infer.onnx.layers.operands import KEEP_VALUES
from infer.onnx.rewrite import GraphBuilder, data

if TYPE_CHECKING:
    import onnx_ir as ir

Signs = Literal["ort-u8u8", "ort-u8s8"]  # of the activations, then of the weights
AXES_AS_INPUT = 18  # the opset in which ReduceMax takes its axes as an input
FORM_KEY = "infer.int8"  # metadata of a written model: the signs its int8 layers were written for


def packed(emit: GraphBuilder, codes: ir.Value, signs: Signs) -> tuple[ir.Value, ir.Value]:
    """Return codes int8 [N, K] as the [K, N] operand of MatMulInteger, and its zero point."""
    if signs == "ort-u8s8":
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
