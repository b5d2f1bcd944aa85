"""Linear layers for TensorRT: DequantizeLinear, which it fuses into the product.

    static int8       QuantizeLinear of the activations by one calibrated scale, DequantizeLinear of both
    int8 weights      DequantizeLinear per column
    int4 (uniform)    DequantizeLinear with a scale for each block of 64 or 16 (opset 21)
    other tables      entries rounded to int8, as high and low int4 halves: two DequantizeLinear in blocks
    float8            QuantizeLinear of the activations by one calibrated scale, DequantizeLinear of both

TensorRT looks nothing up in a table inside a product, and decodes int8 weights with blocks as a whole at every call;
int4 blocks it decodes inside the product. So a table weight takes 8 bits (and two scales a block), not 16, and its
product twice the multiplications. With `weights` "float" all but float8 are decoded when the model is written, for a
library that can't read them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from infer.errors import NotUsableError
from infer.kernels.ops import bitpack
from infer.kernels.ops.coded_weight import CodedWeight
from infer.kernels.ops.linear_packed import rounded_table
from infer.onnx.layers.operands import Weights, add_bias, floats, inputs, uniform_step
from infer.onnx.rewrite import GraphBuilder, data

from .embeddings import int4_blocks, table_rows
from .operands import decoded, dequantized, fake_quantized, float_type

if TYPE_CHECKING:
    import onnx_ir as ir

SMALLEST_GEMM = 16  # int8 GEMMs with a smaller K or N are slower than in float
_HALF = 16  # levels of int4
_TOP = 7 * _HALF + 7  # the largest number of two halves


def linear(emit: GraphBuilder, weights: Weights) -> tuple[ir.Value, str]:
    """Write x float [..., K] times a table-coded weight → [..., N]: int4 blocks, or the decoded weight."""
    x, *packed, bias = inputs(emit, 6)
    dtype = float_type(emit)
    if weights == "float":
        stored = np.ascontiguousarray(table_rows(emit, packed).T.astype(dtype))
        weight, taken = emit.constant(f"{emit.weight_name}/{dtype.name}", stored), "codes decoded when built"
    elif uniform_step(data(packed[2], emit.node).astype(np.float32)) is not None:
        weight, taken = _blocks(emit, *int4_blocks(emit, packed), dtype), "int4 weights, packed in blocks"
    else:
        x = emit("Concat", x, x, axis=-1)
        weight, taken = _blocks(emit, *_halves(emit, packed), dtype), "table codes, packed as two int4 halves"
    return add_bias(emit, emit("MatMul", x, weight), bias, dtype), taken


def int8_linear(emit: GraphBuilder, weights: Weights) -> tuple[ir.Value, str]:
    """Write x float [..., K] times an int8 weight with float activations → [..., N]."""
    x, codes, scale, bias = inputs(emit, 4)
    dtype = float_type(emit)
    if weights == "blocks":
        weight, taken = dequantized(emit, codes, scale, dtype, transposed=True), "int8 weights, packed"
    else:
        weight, taken = (
            decoded(emit, codes, scale, dtype, transposed=True),
            "layer in float, decoded when built",
        )
    return add_bias(emit, emit("MatMul", x, weight), bias, dtype), taken


def dynamic_int8(emit: GraphBuilder) -> tuple[ir.Value, str]:
    """Refuse activation scales that are computed at run time."""
    raise NotUsableError(
        "TensorRT has no dynamic int8", where=emit.prefix, hint="Use --quant int8:static with --data"
    )


def static_int8(emit: GraphBuilder) -> tuple[ir.Value, str]:
    """Write x float [..., K], quantized to int8 by one stored scale, times an int8 weight [N, K] → [..., N]."""
    x, codes, scale, x_scale, bias = inputs(emit, 5)
    dtype = float_type(emit)
    if min(codes.shape) < SMALLEST_GEMM:
        weight, taken = (
            decoded(emit, codes, scale, dtype, transposed=True),
            "layer in float, too small for int8",
        )
    else:
        weight, taken = dequantized(emit, codes, scale, dtype, transposed=True), "static int8"
        x = fake_quantized(emit, x, float(data(x_scale, emit.node).reshape(-1)[0]), dtype)
    return add_bias(emit, emit("MatMul", x, weight), bias, dtype), taken


def float8_linear(emit: GraphBuilder) -> tuple[ir.Value, str]:
    """Write x float [..., K], quantized to float8 by one stored scale, times a float8 weight [N, K] → [..., N]."""
    import onnx_ir as ir

    x, codes, scale, x_scale, bias = inputs(emit, 5)
    dtype, float8 = float_type(emit), ir.DataType.FLOAT8E4M3FN.numpy()
    step = emit.scalar(float(data(x_scale, emit.node).reshape(-1)[0]), dtype)
    zero = emit.constant("const/float8/0", np.zeros((), float8))
    rounded = emit("DequantizeLinear", emit("QuantizeLinear", x, step, zero), step, zero)
    stored = np.ascontiguousarray(data(codes, emit.node).view(np.uint8).T).view(float8)
    weight = emit.constant(f"{codes.name}/float8", stored)
    columns = emit("DequantizeLinear", weight, floats(emit, scale, dtype), axis=1)
    return add_bias(emit, emit("MatMul", rounded, columns), bias, dtype), "float8, a scale per tensor"


def _blocks(emit: GraphBuilder, codes: np.ndarray, steps: np.ndarray, dtype: np.dtype[Any]) -> ir.Value:
    """Return codes int4 [N, K] · steps [N, K / group] as a float [K, N] operand, stored as int4."""
    weight = emit.constant(f"{emit.weight_name}/int4", np.ascontiguousarray(codes.T))
    scales = np.ascontiguousarray(steps.T.astype(dtype))
    scale = emit.constant(f"{emit.weight_name}/{dtype.name}/steps", scales)
    return emit("DequantizeLinear", weight, scale, axis=0, block_size=codes.shape[1] // steps.shape[1])


def _halves(emit: GraphBuilder, packed: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the table's entries as int4 [N, 2K], high halves before low ones, and steps float64 [N, 2K / group].

    Entries are rounded to int8, each table by the level up to 119 that loses least: entry = 16 · high + low.
    """
    import onnx_ir as ir

    codes, scale, table, row_scale = (torch.from_numpy(np.array(data(v, emit.node))) for v in packed)
    rounded, largest = rounded_table(table, _TOP)
    owner = CodedWeight(codes, scale, table, super_scale=row_scale).table_of_rows()
    index = bitpack.unpack(codes, bitpack.bits_of(table)).int() + owner[:, None] * table.shape[1]
    entries = rounded.reshape(-1)[index].numpy().astype(np.int16)
    low = (entries + _HALF // 2) % _HALF - _HALF // 2
    high = (entries - low) // _HALF
    both = np.concatenate([high, low], 1).astype(np.int8).astype(ir.DataType.INT4.numpy())
    rows = (row_scale.double() * largest[owner].double() / bitpack.LEVELS**2)[:, None]
    steps = (scale.double() * rows).numpy()
    return both, np.concatenate([steps * _HALF, steps], 1)
