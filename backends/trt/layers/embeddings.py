"""Embeddings for TensorRT that stay packed in the engine: rows are decoded when they are read.

    int8             DequantizeLinear with a scale per row, Gather
    uniform (int4)   DequantizeLinear with a scale per block, Gather
    other tables     codes in words of 32 bits, Gather, division, lookup in the table

TensorRT fuses the Gather into the DequantizeLinear: no decoded table is held in memory. It takes int8 and int4
constants only below a DequantizeLinear, so codes of any other table are digits of int32 numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from infer.kernels.ops import bitpack
from infer.kernels.ops.coded_weight import CodedWeight
from infer.onnx.layers.operands import Weights, inputs, uniform_step
from infer.onnx.rewrite import GraphBuilder, data

if TYPE_CHECKING:
    import onnx_ir as ir

_WORD = 32  # bits


def embedding(emit: GraphBuilder, weights: Weights) -> tuple[ir.Value, str]:
    """Write ids [...] → rows [..., K] of a table-coded or int8 weight; with `weights` "float" a decoded one."""
    import onnx_ir as ir

    is_int8 = emit.node.op_type == "embedding_int8"
    ids, *packed = inputs(emit, 3 if is_int8 else 5)
    output: Any = emit.node.outputs[0]
    dtype = np.dtype(np.float32) if output.dtype is None else ir.DataType(output.dtype).numpy()
    if is_int8:
        codes, scale = (data(value, emit.node) for value in packed)
        if weights == "float":
            decoded = codes.astype(np.float32) * scale.astype(np.float32)[:, None]
            return _gathered(emit, decoded.astype(dtype), ids), "codes decoded when built"
        return _dequantized(emit, codes, scale.astype(dtype), ids, axis=0), "int8 rows, packed"
    if weights == "float":
        return _gathered(emit, table_rows(emit, packed).astype(dtype), ids), "codes decoded when built"
    if uniform_step(data(packed[2], emit.node).astype(np.float32)) is not None:
        int4, steps = int4_blocks(emit, packed)
        group = int4.shape[1] // steps.shape[1]
        rows = _dequantized(emit, int4, steps.astype(dtype), ids, axis=1, block_size=group)
        return rows, "int4 rows, packed in blocks"
    return _looked_up(emit, ids, packed, dtype), "rows of table codes, packed in words"


def int4_blocks(emit: GraphBuilder, packed: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes of a uniform table as int4 [N, K], and the step of each block, float64 [N, K / group]."""
    import onnx_ir as ir

    codes, scale, table, row_scale = (np.array(data(value, emit.node)) for value in packed)
    step = uniform_step(table.astype(np.float32)) or 0.0
    whole = bitpack.unpack(torch.from_numpy(codes), 4).numpy().astype(np.int8) - np.int8(8)
    rows = row_scale.astype(np.float64)[:, None] * step / bitpack.LEVELS
    return whole.astype(ir.DataType.INT4.numpy()), scale.astype(np.float64) * rows


def table_rows(emit: GraphBuilder, packed: list[Any]) -> np.ndarray:
    """Return the decoded weight of a table-coded layer, float32 [N, K]."""
    codes, scale, table, row_scale = (torch.from_numpy(np.array(data(value, emit.node))) for value in packed)
    return CodedWeight(codes, scale, table, super_scale=row_scale).decode().numpy()


def _gathered(emit: GraphBuilder, weight: np.ndarray, ids: ir.Value) -> ir.Value:
    name = f"{emit.weight_name}/{weight.dtype.name}/{'x'.join(map(str, weight.shape))}"
    return emit("Gather", emit.constant(name, np.ascontiguousarray(weight)), ids, axis=0)


def _dequantized(
    emit: GraphBuilder, codes: np.ndarray, scale: np.ndarray, ids: ir.Value, **attributes: Any
) -> ir.Value:
    name = f"{emit.weight_name}/rows/{codes.dtype.name}"
    weight = emit.constant(name, np.ascontiguousarray(codes))
    steps = emit.constant(f"{name}/{scale.dtype.name}/steps", np.ascontiguousarray(scale))
    zeros = []
    if "block_size" not in attributes:
        zeros = [emit.constant(f"{name}/zero", np.zeros(len(codes), codes.dtype))]
    return emit("Gather", emit("DequantizeLinear", weight, steps, *zeros, **attributes), ids, axis=0)


def _looked_up(emit: GraphBuilder, ids: ir.Value, packed: list[Any], dtype: np.dtype[Any]) -> ir.Value:
    """Write the look-up of table-coded rows: words to digits, digits to table entries, times the group scales."""
    codes, scale, table, row_scale = (np.array(data(value, emit.node)) for value in packed)
    bits, kept = int(table.shape[1]).bit_length() - 1, [0] * len(ids.shape or ())
    columns, groups = codes.shape[1] * 8 // bits, scale.shape[1]

    def reshaped(value: ir.Value, *sizes: int) -> ir.Value:
        shape = [*kept, *sizes]
        return emit("Reshape", value, emit.constant(f"const/sizes/{shape}", np.array(shape, np.int64)))

    last = emit.constant("const/last_axis", np.array([-1], np.int64))
    words = emit.constant(f"{emit.weight_name}/words", packed_words(codes, bits))
    powers = emit.constant(f"const/powers/{bits}", (2 ** (bits * np.arange(_WORD // bits))).astype(np.int32))
    row = emit("Unsqueeze", emit("Gather", words, ids, axis=0), last)
    above = emit("Div", emit("Sub", row, emit("Mod", row, powers)), powers)  # exact, whatever the sign
    digits = reshaped(emit("Mod", above, emit.scalar(2**bits, np.int32)), -1)
    if words.shape[1] * (_WORD // bits) != columns:  # type: ignore[index,operator]
        zero, end = (emit.constant(f"const/size/{n}", np.array([n], np.int64)) for n in (0, columns))
        digits = emit("Slice", digits, zero, end, last)
    if len(table) > 1:
        owner = emit("Div", emit("Cast", ids, to=6), emit.scalar(bitpack.TABLE_ROWS, np.int32))
        first = emit("Mul", owner, emit.scalar(2**bits, np.int32))
        digits = emit("Add", digits, emit("Unsqueeze", first, last))
    entries = emit.constant(f"{emit.weight_name}/entries/{dtype.name}", table.reshape(-1).astype(dtype))
    values = reshaped(emit("Gather", entries, digits, axis=0), groups, columns // groups)
    steps = scale.astype(np.float64) * (row_scale.astype(np.float64) / bitpack.LEVELS)[:, None]
    steps_name = f"{emit.weight_name}/row_steps/{dtype.name}"
    of_row = emit("Gather", emit.constant(steps_name, steps.astype(dtype)), ids, axis=0)
    return reshaped(emit("Mul", values, emit("Unsqueeze", of_row, last)), columns)


def packed_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return codes uint8 [N, K * bits / 8] as the digits of int32 [N, K / (32 // bits)], the first one lowest."""
    whole = bitpack.unpack(torch.from_numpy(codes), bits).numpy()
    each = _WORD // bits
    padded = np.pad(whole, ((0, 0), (0, -whole.shape[1] % each))).astype(np.uint32)
    shifts = (bits * np.arange(each)).astype(np.uint32)
    words = (padded.reshape(len(whole), -1, each) << shifts).sum(2, dtype=np.uint32)
    return words.view(np.int32)
