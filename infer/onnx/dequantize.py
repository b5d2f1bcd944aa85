"""Weight-only and float8 layers for TensorRT: DequantizeLinear where it has one, else decoded when written.

    int8 weights      DequantizeLinear per column
    int4 (uniform)    DequantizeLinear with a scale for each block of 64 or 16 (opset 21)
    other tables      decoded: TensorRT looks nothing up in a table inside a product
    float8            QuantizeLinear of the activations by one calibrated scale, DequantizeLinear of both
    embeddings        decoded

With `weights` "float" the first two are decoded too, for a library that can't read them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..kernels.ops import bitpack
from .graph_builder import GraphBuilder, data
from .int8_operands import add_bias, decoded, dequantized, float_type, floats, inputs
from .table_layers import Weights, uniform_step

if TYPE_CHECKING:
    import onnx_ir as ir

_ZERO_CODE = 8  # of the 16 uniform codes


def linear(emit: GraphBuilder, weights: Weights) -> tuple[ir.Value, str]:
    """Write x float [..., K] times a table-coded weight → [..., N]: int4 blocks, or the decoded weight."""
    x, *packed, bias = inputs(emit, 6)
    dtype = float_type(emit, "trt")
    step = uniform_step(data(packed[1], emit.node).astype(np.float32))
    if step is not None and weights == "blocks":
        weight, taken = _int4(emit, packed, step, dtype), "int4 weights, packed in blocks"
    else:
        weight, taken = _stored(emit, _lut_rows(emit, packed).T.astype(dtype)), "codes decoded when built"
    return add_bias(emit, emit("MatMul", x, weight), bias, dtype), taken


def int8_linear(emit: GraphBuilder, weights: Weights) -> tuple[ir.Value, str]:
    """Write x float [..., K] times an int8 weight with float activations → [..., N]."""
    x, codes, scale, bias = inputs(emit, 4)
    dtype = float_type(emit, "trt")
    if weights == "blocks":
        weight, taken = dequantized(emit, codes, scale, dtype), "int8 weights, packed"
    else:
        weight, taken = decoded(emit, codes, scale, dtype), "layer in float, decoded when built"
    return add_bias(emit, emit("MatMul", x, weight), bias, dtype), taken


def float8_linear(emit: GraphBuilder, weights: Weights) -> tuple[ir.Value, str]:
    """Write x float [..., K], quantized to float8 by one stored scale, times a float8 weight [N, K] → [..., N]."""
    import onnx_ir as ir

    x, codes, scale, x_scale, bias = inputs(emit, 5)
    dtype, float8 = float_type(emit, "trt"), ir.DataType.FLOAT8E4M3FN.numpy()
    step = emit.scalar(float(data(x_scale, emit.node).reshape(-1)[0]), dtype)
    zero = emit.constant("const/float8/0", np.zeros((), float8))
    rounded = emit("DequantizeLinear", emit("QuantizeLinear", x, step, zero), step, zero)
    stored = np.ascontiguousarray(data(codes, emit.node).view(np.uint8).T).view(float8)
    weight = emit.constant(f"{codes.name}/float8", stored)
    columns = emit("DequantizeLinear", weight, floats(emit, scale, dtype), axis=1)
    return add_bias(emit, emit("MatMul", rounded, columns), bias, dtype), "float8, a scale per tensor"


def embedding(emit: GraphBuilder, weights: Weights) -> tuple[ir.Value, str]:
    """Write ids [...] → rows [..., K] of a table-coded or int8 weight, decoded."""
    import onnx_ir as ir

    ids, *packed = inputs(emit, 5 if emit.node.op_type == "embedding_lut" else 3)
    output: Any = emit.node.outputs[0]
    dtype = np.dtype(np.float32) if output.dtype is None else ir.DataType(output.dtype).numpy()
    if emit.node.op_type == "embedding_lut":
        rows = _lut_rows(emit, packed)
    else:
        codes, scale = (data(value, emit.node) for value in packed)
        rows = codes.astype(np.float32) * scale.astype(np.float32)[:, None]
    return emit("Gather", _stored(emit, rows.astype(dtype)), ids, axis=0), "codes decoded when built"


def _int4(emit: GraphBuilder, packed: list[Any], step: float, dtype: np.dtype[Any]) -> ir.Value:
    """Return codes uint8 [N, K / 2] · scales [N, K / group] as a float [K, N] operand, stored as int4."""
    import onnx_ir as ir

    codes, _, scale, row_scale = (np.array(data(value, emit.node)) for value in packed)
    whole = bitpack.unpack(torch.from_numpy(codes), 4).numpy().astype(np.int8) - np.int8(_ZERO_CODE)
    int4 = np.ascontiguousarray(whole.T).astype(ir.DataType.INT4.numpy())
    rows = row_scale.astype(np.float64)[:, None] * step / bitpack.LEVELS
    steps = np.ascontiguousarray((scale.astype(np.float64) * rows).T.astype(dtype))
    weight = emit.constant(f"{emit.weight_name}/int4", int4)
    scales = emit.constant(f"{emit.weight_name}/{dtype.name}/steps", steps)
    group = whole.shape[1] // scale.shape[1]
    return emit("DequantizeLinear", weight, scales, axis=0, block_size=group)


def _lut_rows(emit: GraphBuilder, packed: list[Any]) -> np.ndarray:
    codes, table, scale, row_scale = (torch.from_numpy(np.array(data(v, emit.node))) for v in packed)
    return bitpack.decode(codes, table, scale, row_scale, bitpack.tables_of_rows(len(codes), table)).numpy()


def _stored(emit: GraphBuilder, weight: np.ndarray) -> ir.Value:
    name = f"{emit.weight_name}/{weight.dtype.name}/{'x'.join(map(str, weight.shape))}"
    return emit.constant(name, np.ascontiguousarray(weight))
