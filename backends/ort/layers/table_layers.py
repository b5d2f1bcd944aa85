"""Table-coded layers for ONNX Runtime, packed in the file as in the model.

    table           "blocks"                                            "float"
    uniform (int4)  MatMulNBits of 4 bits: the codes as they are        the same
    any other       MatMulNBits of 8 bits: codes through a table of     weights in float32, MatMul
                    int8 entries, when the session is created

Rows of a uniform embedding are decoded by GatherBlockQuantized; other embeddings are torch operators by then.

Both kinds of MatMulNBits have blocks of 64 weights, or of 16 where those share a scale, and accuracy_level 4:
activations in int8 for each block, exact integer sums. (Without the level, 8 bits are 80 times slower; MatMulBnb4
decodes the whole weight at every call.) What is computed from initialisers alone, ONNX Runtime computes once, when it
creates the session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from infer.errors import NotUsableError
from infer.kernels.ops.bitpack import LEVELS, TABLE_ROWS, bits_of
from infer.kernels.ops.linear_packed import rounded_table
from infer.onnx.layers.operands import FLOAT, Weights, add_bias, as_float, inputs, uniform_step
from infer.onnx.rewrite import GraphBuilder, data

if TYPE_CHECKING:
    import onnx_ir as ir

MICROSOFT = "com.microsoft"
UNIFORM = "int4 blocks, activations in int8"
BLOCKS = "8-bit blocks, activations in int8"


def linear(emit: GraphBuilder, weights: Weights) -> tuple[ir.Value, str]:
    """Write x float [..., K] times a table-coded weight → [..., N]."""
    x, codes, scale, table, row_scale, bias = inputs(emit, 6)
    x, restore = as_float(emit, x)
    numbers = data(table, emit.node).astype(np.float32)
    rows, groups = data(scale, emit.node).shape
    group = _columns(emit, codes, numbers) // groups
    size = {"K": groups * group, "N": rows, "block_size": group, "accuracy_level": 4}
    step = uniform_step(numbers)
    if step is not None:
        blocks = emit("Reshape", codes, _shape(emit, 0, groups, group // 2))
        steps = _steps(emit, scale, row_scale, np.full(rows, step / LEVELS))
        y, taken = emit("MatMulNBits", x, blocks, steps, domain=MICROSOFT, bits=4, **size), UNIFORM
    elif weights == "blocks":
        rounded, factor = rounded_table(torch.from_numpy(numbers))
        entries = emit.constant(f"{table.name}/uint8", (rounded.numpy() + np.int16(128)).astype(np.uint8))
        index = _index(emit, codes, bits_of(torch.from_numpy(numbers)), _first_entries(numbers, rows))
        values = emit("Gather", emit("Reshape", entries, _shape(emit, -1)), index, axis=0)
        blocks = emit("Reshape", values, _shape(emit, 0, groups, group))
        own = factor.numpy()[_table_of(numbers, rows)] / LEVELS**2
        steps = _steps(emit, scale, row_scale, own)
        y, taken = emit("MatMulNBits", x, blocks, steps, domain=MICROSOFT, bits=8, **size), BLOCKS
    else:
        y, taken = emit("MatMul", x, _float(emit, codes, numbers, scale, row_scale)), FLOAT
    return restore(add_bias(emit, y, bias)), taken


def embedding(emit: GraphBuilder) -> tuple[ir.Value, str]:
    """Write ids [...] → rows [..., K] of a uniform table-coded weight."""
    import onnx_ir as ir

    ids, codes, scale, table, row_scale = inputs(emit, 5)
    numbers = data(table, emit.node).astype(np.float32)
    step = uniform_step(numbers)
    if step is None:
        raise NotUsableError(
            "ONNX Runtime has no operator that looks rows up in a table whose values are not evenly spaced",
            where=emit.prefix,
            hint="Pin this layer to int8 or float with --layer, or use --backend inductor",
        )
    steps = _steps(emit, scale, row_scale, np.full(data(row_scale, emit.node).shape[0], step / LEVELS))
    group = _columns(emit, codes, numbers) // data(scale, emit.node).shape[1]
    shape = {"bits": 4, "block_size": group, "quantize_axis": 1, "gather_axis": 0}
    rows = emit("GatherBlockQuantized", codes, ids, steps, domain=MICROSOFT, **shape)
    dtype = emit.node.outputs[0].dtype
    if dtype not in (None, ir.DataType.FLOAT):
        rows = emit("Cast", rows, to=int(dtype))
    return rows, "int4 rows"


def _columns(emit: GraphBuilder, codes: ir.Value, table: np.ndarray) -> int:
    """Return K, from packed codes uint8 [N, K * bits / 8]."""
    return int(data(codes, emit.node).shape[1] * 8 // bits_of(torch.from_numpy(table)))


def _table_of(table: np.ndarray, rows: int) -> np.ndarray:
    """Return the table index of each row: int32 [N]."""
    owners = np.arange(rows, dtype=np.int32) // TABLE_ROWS
    return owners if table.shape[0] > 1 else np.zeros_like(owners)


def _first_entries(table: np.ndarray, rows: int) -> np.ndarray | None:
    """Return the offset of each row's table among all entries: int32 [N, 1]; None for a single table."""
    return None if table.shape[0] == 1 else (_table_of(table, rows) * np.int32(table.shape[1]))[:, None]


def _steps(emit: GraphBuilder, scale: ir.Value, row_scale: ir.Value, factor: np.ndarray) -> ir.Value:
    """Compute `scale * row_scale * factor` float32 [N, K / group], stored as int8 and two vectors."""
    rows = data(row_scale, emit.node).astype(np.float64) * factor
    name = f"{row_scale.name}/{emit.prefix}/steps"
    return emit("Mul", emit("Cast", scale, to=1), emit.constant(name, rows.astype(np.float32)[:, None]))


def _float(
    emit: GraphBuilder, codes: ir.Value, table: np.ndarray, scale: ir.Value, row_scale: ir.Value
) -> ir.Value:
    """Return the decoded weight, float32 [K, N]."""
    rows, groups = data(scale, emit.node).shape
    columns = _columns(emit, codes, table)
    entries = emit.constant(f"{emit.weight_name}/entries", table.reshape(-1))
    index = _index(emit, codes, bits_of(torch.from_numpy(table)), _first_entries(table, rows))
    grouped = emit(
        "Reshape", emit("Gather", entries, index, axis=0), _shape(emit, 0, groups, columns // groups)
    )
    steps = _steps(emit, scale, row_scale, np.full(rows, 1 / LEVELS))
    whole = emit("Mul", grouped, emit("Unsqueeze", steps, _shape(emit, -1)))
    return emit("Transpose", emit("Reshape", whole, _shape(emit, 0, columns)), perm=[1, 0])


def _shape(emit: GraphBuilder, *sizes: int) -> ir.Value:
    """Return sizes for Reshape (0 keeps one, -1 is the rest), or axes for Unsqueeze."""
    return emit.constant(f"const/sizes/{sizes}", np.array(sizes, np.int64))


def _index(emit: GraphBuilder, codes: ir.Value, bits: int, first: np.ndarray | None) -> ir.Value:
    """Unpack codes uint8 [N, K * bits / 8] → int32 [N, K], the bit stream of `bitpack`; `first` is added to rows."""
    num_bytes = int(np.lcm(bits, 8)) // 8
    columns = data(codes, emit.node).shape[1] * 8 // bits
    units = emit("Reshape", codes, _shape(emit, 0, -1, num_bytes))
    mask = emit.scalar(2**bits - 1, np.uint8)

    def shifted(byte: int, shift: int, direction: str) -> ir.Value:
        value = emit("Gather", units, emit.scalar(byte, np.int64), axis=2)
        return emit("BitShift", value, emit.scalar(shift, np.uint8), direction=direction) if shift else value

    parts = []
    for position in range(num_bytes * 8 // bits):
        byte, shift = divmod(position * bits, 8)
        part = shifted(byte, shift, "RIGHT")
        if shift + bits > 8:
            part = emit("BitwiseOr", part, shifted(byte + 1, 8 - shift, "LEFT"))
        parts.append(emit("Unsqueeze", emit("BitwiseAnd", part, mask), _shape(emit, -1)))
    index = emit("Cast", emit("Reshape", emit("Concat", *parts, axis=-1), _shape(emit, 0, columns)), to=6)
    if first is None:
        return index
    return emit("Add", index, emit.constant(f"{emit.weight_name}/first", first))
