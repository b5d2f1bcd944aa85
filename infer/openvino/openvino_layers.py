"""Quantized layers for OpenVINO: `infer::` nodes of an exported model as compressed constants of its CPU plugin.

    layer        weight                                          activations
    dynamic      int8, a scale per row                           int8 of the whole row, or finer (see `group`)
    weight-only  int8, a scale per row                           float
    uniform      int4, a scale per 64 or 16                      int8 for each 64 (16) columns
    other tables codes, expanded to int8 when the model opens    int8 for each 64 (16) columns
    static       int8, a scale per row                           FakeQuantize with the calibrated scale, int8
    conv2d       int8, a scale per channel; float arithmetic     the same when static, and int8 arithmetic

The plugin quantizes activations itself, symmetrically, by one group size for the whole model. A group as long as the
row gives the numbers of `infer::linear_int8`, groups of 64 those of `lut4_twin`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..kernels.ops.bitpack import LEVELS, TABLE_ROWS, bits_of, group_of, unpack
from ..kernels.ops.linear_packed import rounded_table
from ..onnx.layers.int8_operands import KEEP_VALUES
from ..onnx.layers.quantized_layers import DOMAIN, RewriteResult
from ..onnx.layers.table_layers import uniform_step

Array = np.ndarray
SMALLEST_GROUP = 32  # columns; smaller groups cost more than they gain
_MULTIPLE = 16  # of which a group of the plugin must be a multiple
_HALF = 8  # the 4-bit code that stands for zero
_OPTIONS = ("stride", "padding", "dilation")


@dataclass
class LayerConverter:
    """Conversion of the nodes of the domain `infer`; collects their forms, and what the group size depends on."""

    done: RewriteResult = field(default_factory=RewriteResult)
    columns: set[int] = field(default_factory=set)  # K of dynamic int8 layers
    groups: set[int] = field(default_factory=set)  # of table layers
    num_weight_only: int = 0
    num_static: int = 0

    @property
    def group(self) -> int:
        """Columns of an activation that share a scale; 0 where activations must stay float.

        The largest group that fits every layer is the fastest. A layer whose columns are no multiple of it is computed
        with float activations.
        """
        if self.num_weight_only or not (self.columns or self.groups):
            return 0
        if self.groups:
            return min(self.groups)
        common = math.gcd(*self.columns)
        return common if common >= SMALLEST_GROUP and common % _MULTIPLE == 0 else SMALLEST_GROUP

    def extensions(self) -> list[Any]:
        """Return the extensions for `openvino.Core.add_extension`."""
        from openvino.frontend.onnx import ConversionExtension

        rules: dict[str, Callable[[Any], Any]] = {
            "linear_int8": self._dynamic,
            "linear_int8_weight": self._weight_only,
            "linear_int8_static": self._static,
            "linear_lut": self._table,
            "embedding_lut": self._embedding,
            "conv2d_int8": self._conv,
            "conv2d_int8_weight": self._conv,
            "conv2d_int8_static": self._static_conv,
        }
        return [ConversionExtension(name, DOMAIN, _outputs(rule)) for name, rule in rules.items()]

    def _dynamic(self, node: Any) -> Any:
        x, codes, scale, bias = _inputs(node, 4)
        self.columns.add(_data(codes).shape[1])
        self.done.forms["int8 weights, activations in int8"] += 1
        return _product(x, _weight(_data(codes), _data(scale), x), bias)

    def _weight_only(self, node: Any) -> Any:
        x, codes, scale, bias = _inputs(node, 4)
        self.num_weight_only += 1
        self.done.forms["int8 weights, activations in float"] += 1
        return _product(x, _weight(_data(codes), _data(scale), x), bias)

    def _static(self, node: Any) -> Any:
        x, codes, scale, x_scale, bias = _inputs(node, 5)
        self.num_static += 1
        self.done.forms["static int8"] += 1
        return _product(_on_grid(x, x_scale), _weight(_data(codes), _data(scale), x), bias)

    def _table(self, node: Any) -> Any:
        x, *packed, bias = _inputs(node, 6)
        weight, group, form = _table_weight(packed, x.get_element_type())
        self.groups.add(group)
        self.done.forms[form] += 1
        return _product(x, weight, bias)

    def _embedding(self, node: Any) -> Any:
        """Look up rows of a uniform table, which the plugin decodes one by one."""
        from openvino import opset13 as ops

        ids, *packed = _inputs(node, 5)
        weight, _, _ = _table_weight(packed, "f32", folded=True)
        self.done.forms["int4 rows"] += 1
        return ops.gather(weight, ids, ops.constant(np.int64(0)))

    def _conv(self, node: Any) -> Any:
        x, codes, scale, bias = _inputs(node, 4)
        self.done.forms["convolution in float, int8 weights"] += 1
        return _convolution(node, x, _data(codes), _data(scale), bias)

    def _static_conv(self, node: Any) -> Any:
        x, codes, scale, x_scale, bias = _inputs(node, 5)
        self.num_static += 1
        self.done.forms["static int8 convolution"] += 1
        return _convolution(node, _on_grid(x, x_scale), _data(codes), _data(scale), bias)


def _outputs(rule: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    return lambda node: rule(node).outputs()


def _inputs(node: Any, count: int) -> list[Any]:
    """Return the node's inputs padded with None to `count`."""
    given = node.get_input_size()
    return [node.get_input(index) if index < given else None for index in range(count)]


def _data(value: Any) -> Array:
    """Return a copy of a stored tensor; the node that owns it doesn't outlive the conversion."""
    return np.array(value.get_node().data)


def _weight(codes: Array, scale: Array, x: Any) -> Any:
    """Return codes int8 [N, …] times scale [N] as a compressed constant in the dtype of `x`."""
    from openvino import opset13 as ops

    steps = scale.astype(np.float32).reshape(-1, *[1] * (codes.ndim - 1))
    weight = ops.multiply(ops.convert(ops.constant(codes), "f32"), ops.constant(steps))
    return _in_dtype(weight, x.get_element_type())


def _in_dtype(value: Any, kind: Any) -> Any:
    from openvino import opset13 as ops

    name = kind if isinstance(kind, str) else kind.get_type_name()
    return value if name == "f32" else ops.convert(value, name)


def _product(x: Any, weight: Any, bias: Any) -> Any:
    from openvino import opset13 as ops

    y = ops.matmul(x, weight, False, True)
    if bias is None:
        return y
    addend = ops.constant(_data(bias).astype(np.float32))
    return ops.add(y, _in_dtype(addend, x.get_element_type()))


def _on_grid(x: Any, x_scale: Any) -> Any:
    """Round `x` to the calibrated int8 grid; values that can't be negative use the whole unsigned range."""
    from openvino import opset13 as ops

    step = float(_data(x_scale).reshape(-1)[0])
    low, levels = (0.0, 256) if _is_positive(x) else (-(LEVELS + 1) * step, 256)
    kind = np.dtype(x.get_element_type().to_dtype())
    ends = [ops.constant(np.array(end, kind)) for end in (low, LEVELS * step)]
    return ops.fake_quantize(x, *ends, *ends, levels)


def _is_positive(value: Any) -> bool:
    node = value.get_node()
    while node.get_type_name() in KEEP_VALUES:
        node = node.input_value(0).get_node()
    return bool(node.get_type_name() == "Relu")


def _table_weight(packed: Sequence[Any], kind: Any, *, folded: bool = False) -> tuple[Any, int, str]:
    """Return a table-coded weight [N, K], the columns that share a scale, and its form.

    Scales are stored as int8 and a number for each row, or `folded`, as the plugin's gather wants them.
    """
    from openvino import opset13 as ops

    codes, table, scale, row_scale = map(_data, packed)
    numbers = torch.from_numpy(table.astype(np.float32))
    bits, (rows, groups) = bits_of(numbers), scale.shape
    group = group_of(torch.from_numpy(codes), numbers, torch.from_numpy(scale))
    index = unpack(torch.from_numpy(codes), bits).numpy()
    step = uniform_step(table.astype(np.float32))
    if step is not None:
        integers, form = _four_bits(index ^ _HALF, "i4", (rows, groups, group)), "int4 weights in blocks"
        unit = np.full(rows, step / LEVELS)
    else:
        rounded, factor = rounded_table(numbers)
        stored = index.reshape(rows, groups, group)
        narrow = _four_bits(index, "u4", stored.shape) if bits <= 4 else ops.constant(stored)
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
    return _in_dtype(whole, kind), group, f"{form}, activations in int8"


def _four_bits(values: Array, kind: str, shape: tuple[int, ...]) -> Any:
    """Store uint8 values below 16 in half a byte each, the first in the low half."""
    import openvino
    from openvino import opset13 as ops

    pairs = values.reshape(-1, 2)
    packed = np.ascontiguousarray(pairs[:, 0] | pairs[:, 1] << 4)
    tensor = openvino.Tensor(packed, openvino.Shape(list(shape)), getattr(openvino.Type, kind))
    return ops.constant(tensor, shared_memory=False)


def _convolution(node: Any, x: Any, codes: Array, scale: Array, bias: Any) -> Any:
    from openvino import opset13 as ops

    stride, padding, dilation = (list(node.get_attribute(name)) for name in _OPTIONS)
    groups = int(node.get_attribute("groups"))
    if groups > 1:
        codes = codes.reshape(groups, -1, *codes.shape[1:])
        scale = scale.reshape(groups, -1)
        weight = ops.multiply(
            ops.convert(ops.constant(codes), "f32"),
            ops.constant(scale.astype(np.float32)[..., None, None, None]),
        )
        y = ops.group_convolution(
            x, _in_dtype(weight, x.get_element_type()), stride, padding, padding, dilation
        )
    else:
        y = ops.convolution(x, _weight(codes, scale, x), stride, padding, padding, dilation)
    if bias is None:
        return y
    addend = ops.constant(_data(bias).astype(np.float32).reshape(1, -1, 1, 1))
    return ops.add(y, _in_dtype(addend, x.get_element_type()))
