"""Packed layers that TensorRT can't run: their weights are decoded when the model is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..kernels.ops import bitpack
from .graph_builder import GraphBuilder, data
from .int8_operands import Target, add_bias, float_type, inputs

if TYPE_CHECKING:
    import onnx_ir as ir


def linear(emit: GraphBuilder, target: Target) -> tuple[ir.Value, str]:
    """Write x float [..., K] times a table-coded weight → [..., N], the weight decoded."""
    x, *packed, bias = inputs(emit, 6)
    dtype = float_type(emit, target)
    weight = _stored(emit, _lut_rows(emit, packed).T.astype(dtype))
    return add_bias(emit, emit("MatMul", x, weight), bias, dtype), "codes decoded when built"


def embedding(emit: GraphBuilder, target: Target) -> tuple[ir.Value, str]:
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


def _lut_rows(emit: GraphBuilder, packed: list[Any]) -> np.ndarray:
    codes, table, scale, row_scale = (torch.from_numpy(np.array(data(v, emit.node))) for v in packed)
    return bitpack.decode(codes, table, scale, row_scale, bitpack.tables_of_rows(len(codes), table)).numpy()


def _stored(emit: GraphBuilder, weight: np.ndarray) -> ir.Value:
    name = f"{emit.weight_name}/{weight.dtype.name}/{'x'.join(map(str, weight.shape))}"
    return emit.constant(name, np.ascontiguousarray(weight))
