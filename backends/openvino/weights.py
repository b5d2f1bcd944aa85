"""Quantized weights as compressed constants, which OpenVINO's CPU plugin keeps packed: int8 rows, and table codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from infer.kernels.ops.bitpack import LEVELS, TABLE_ROWS, bits_of, unpack
from infer.kernels.ops.linear_packed import rounded_table
from infer.onnx.layers.operands import uniform_step

from .library import library

Array = np.ndarray
_HALF = 8  # the 4-bit code that stands for zero


def stored(value: Any) -> Array:
    """Return a copy of a stored tensor; the node that owns it doesn't outlive the conversion."""
    return np.array(value.get_node().data)


def row_scaled(codes: Array, scale: Array, x: Any) -> Any:
    """Return codes int8 [N, …] times scale [N] as a compressed constant in the dtype of `x`."""
    from openvino import opset13 as ops

    steps = scale.astype(np.float32).reshape(-1, *[1] * (codes.ndim - 1))
    weight = ops.multiply(ops.convert(ops.constant(codes), "f32"), ops.constant(steps))
    return in_dtype(weight, x.get_element_type())


def in_dtype(value: Any, kind: Any) -> Any:
    from openvino import opset13 as ops

    name = kind if isinstance(kind, str) else kind.get_type_name()
    return value if name == "f32" else ops.convert(value, name)


def table_coded(packed: Sequence[Any], kind: Any, *, folded: bool = False) -> tuple[Any, int, str]:
    """Return a table-coded weight [N, K], the columns that share a scale, and its form.

    Scales are stored as int8 and a number for each row, or `folded`, as the plugin's gather wants them.
    """
    from openvino import opset13 as ops

    codes, scale, table, row_scale = map(stored, packed)
    numbers = torch.from_numpy(table.astype(np.float32))
    bits, (rows, groups) = bits_of(numbers), scale.shape
    group = codes.shape[1] * 8 // bits // groups
    index = unpack(torch.from_numpy(codes), bits).numpy()
    step = uniform_step(table.astype(np.float32))
    if step is not None:
        integers, form = _four_bits(index ^ _HALF, "i4", (rows, groups, group)), "int4 weights in blocks"
        unit = np.full(rows, step / LEVELS)
    else:
        rounded, factor = rounded_table(numbers)
        grouped = index.reshape(rows, groups, group)
        narrow = _four_bits(index, "u4", grouped.shape) if bits <= 4 else ops.constant(grouped)
        places = ops.convert(narrow, "i32")
        owner = np.arange(rows, dtype=np.int32) // TABLE_ROWS if len(table) > 1 else np.zeros(rows, np.int32)
        if len(table) > 1:
            places = ops.add(places, ops.constant((owner << bits)[:, None, None]))
        entries = ops.constant(rounded.numpy().reshape(-1))
        integers, form = (
            ops.gather(entries, places, ops.constant(np.int64(0))),
            "codes, int8 blocks in memory",
        )
        unit = factor.numpy()[owner] / LEVELS**2
    by_row = (row_scale.astype(np.float64) * unit).astype(np.float32)
    if folded:
        steps = ops.constant(scale[:, :, None].astype(np.float32) * by_row[:, None, None])
    else:
        stored_steps = ops.convert(ops.constant(scale[:, :, None]), "f32")
        steps = ops.multiply(stored_steps, ops.constant(by_row[:, None, None]))
    weight = ops.multiply(ops.convert(integers, "f32"), steps)
    whole = ops.reshape(weight, ops.constant(np.array([rows, groups * group], np.int64)), False)
    return in_dtype(whole, kind), group, f"{form}, activations in int8"


def _four_bits(values: Array, kind: str, shape: tuple[int, ...]) -> Any:
    """Store uint8 values below 16 in half a byte each, the first in the low half."""
    from openvino import opset13 as ops

    pairs = values.reshape(-1, 2)
    packed = np.ascontiguousarray(pairs[:, 0] | pairs[:, 1] << 4)
    ov = library()
    tensor = ov.Tensor(packed, ov.Shape(list(shape)), getattr(ov.Type, kind))
    return ops.constant(tensor, shared_memory=False)
