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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from infer.kernels.ops.bitpack import LEVELS
from infer.onnx.decompositions import TABLE_EMBEDDING, TABLE_LINEAR
from infer.onnx.layers.operands import KEEP_VALUES
from infer.onnx.rewrite import DOMAIN, RewriteResult

from .weights import Array, in_dtype, row_scaled, stored, table_coded

SMALLEST_GROUP = 32  # columns; smaller groups cost more than they gain
_MULTIPLE = 16  # of which a group of the plugin must be a multiple
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
            TABLE_LINEAR: self._table,
            TABLE_EMBEDDING: self._embedding,
            "conv2d_int8": self._conv,
            "conv2d_int8_weight": self._conv,
            "conv2d_int8_static": self._static_conv,
        }
        return [ConversionExtension(name, DOMAIN, _outputs(rule)) for name, rule in rules.items()]

    def _dynamic(self, node: Any) -> Any:
        x, codes, scale, bias = _inputs(node, 4)
        self.columns.add(stored(codes).shape[1])
        self.done.forms["int8 weights, activations in int8"] += 1
        return _product(x, row_scaled(stored(codes), stored(scale), x), bias)

    def _weight_only(self, node: Any) -> Any:
        x, codes, scale, bias = _inputs(node, 4)
        self.num_weight_only += 1
        self.done.forms[f"{_bits(codes)} weights, activations in float"] += 1
        return _product(x, row_scaled(stored(codes), stored(scale), x), bias)

    def _static(self, node: Any) -> Any:
        x, codes, scale, x_scale, bias = _inputs(node, 5)
        self.num_static += 1
        self.done.forms["static int8"] += 1
        return _product(_on_grid(x, x_scale), row_scaled(stored(codes), stored(scale), x), bias)

    def _table(self, node: Any) -> Any:
        x, *packed, bias = _inputs(node, 6)
        weight, group, form = table_coded(packed, x.get_element_type())
        self.groups.add(group)
        self.done.forms[form] += 1
        return _product(x, weight, bias)

    def _embedding(self, node: Any) -> Any:
        """Look up rows of a uniform table, which the plugin decodes one by one."""
        from openvino import opset13 as ops

        ids, *packed = _inputs(node, 5)
        weight, _, _ = table_coded(packed, "f32", folded=True)
        self.done.forms["int4 rows"] += 1
        return ops.gather(weight, ids, ops.constant(np.int64(0)))

    def _conv(self, node: Any) -> Any:
        x, codes, scale, bias = _inputs(node, 4)
        self.done.forms[f"convolution in float, {_bits(codes)} weights"] += 1
        return _convolution(node, x, stored(codes), stored(scale), bias)

    def _static_conv(self, node: Any) -> Any:
        x, codes, scale, x_scale, bias = _inputs(node, 5)
        self.num_static += 1
        self.done.forms["static int8 convolution"] += 1
        return _convolution(node, _on_grid(x, x_scale), stored(codes), stored(scale), bias)


def _bits(codes: Any) -> str:
    return "fp16" if codes.get_element_type().get_type_name() == "f16" else "int8"


def _outputs(rule: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    return lambda node: rule(node).outputs()


def _inputs(node: Any, count: int) -> list[Any]:
    """Return the node's inputs padded with None to `count`."""
    num_inputs = node.get_input_size()
    return [node.get_input(index) if index < num_inputs else None for index in range(count)]


def _product(x: Any, weight: Any, bias: Any) -> Any:
    from openvino import opset13 as ops

    y = ops.matmul(x, weight, False, True)
    if bias is None:
        return y
    addend = ops.constant(stored(bias).astype(np.float32))
    return ops.add(y, in_dtype(addend, x.get_element_type()))


def _on_grid(x: Any, x_scale: Any) -> Any:
    """Round `x` to the calibrated int8 grid; values that can't be negative use the whole unsigned range."""
    from openvino import opset13 as ops

    step = float(stored(x_scale).reshape(-1)[0])
    low, levels = (0.0, 256) if _is_positive(x) else (-(LEVELS + 1) * step, 256)
    kind = np.dtype(x.get_element_type().to_dtype())
    ends = [ops.constant(np.array(end, kind)) for end in (low, LEVELS * step)]
    return ops.fake_quantize(x, *ends, *ends, levels)


def _is_positive(value: Any) -> bool:
    node = value.get_node()
    while node.get_type_name() in KEEP_VALUES:
        node = node.input_value(0).get_node()
    return bool(node.get_type_name() == "Relu")


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
            x, in_dtype(weight, x.get_element_type()), stride, padding, padding, dilation
        )
    else:
        y = ops.convolution(x, row_scaled(codes, scale, x), stride, padding, padding, dilation)
    if bias is None:
        return y
    addend = ops.constant(stored(bias).astype(np.float32).reshape(1, -1, 1, 1))
    return ops.add(y, in_dtype(addend, x.get_element_type()))
