"""Weights of an ONNX source: found behind constants and transpositions, stored as int8 or fp16, and counted.

A weight that an operator reads only in float (convolutions, recurrent layers, products of two computed shapes) becomes
codes that ONNX Runtime decodes when the session is created: a quarter on disk, or half, at the same speed. Since they
are decoded once, codes of int8 have a scale for every few values: of a channel's largest scale a share in 255 steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...coverage import Coverage
from ...kernels.ops.linear_int8 import halved as halved_rows
from ..layers.operands import folded
from ..rewrite import GraphBuilder
from . import FP16, INT8

if TYPE_CHECKING:
    import onnx_ir as ir

SMALLEST = 32 * 32  # values below which a weight is not worth its decoding
FEWEST_PRODUCTS = 64  # of an output of a grouped convolution; a weight with fewer gets fp16 in place of int8
BLOCK = 32  # values with a scale of their own, at most
STEPS = 255  # of a block's scale, relative to the largest one of its channel
SEPARATE_IR_VERSION = 4  # the first of files whose weights need not be inputs
# Exporters reorder the gates of a recurrent layer with these; what is made of constants is computed once.
_MOVES = ("Slice", "Split", "Concat", "Squeeze", "Unsqueeze", "Reshape", "Transpose", "Identity")
_RECURRENT = ("LSTM", "GRU", "RNN")


@dataclass
class SourceWeights:
    """Float weights found in a graph, with the reason of each that stays float."""

    coverage: Coverage = field(default_factory=Coverage)
    found: dict[str, tuple[str, int, int]] = field(default_factory=dict)  # name → first reader, values, bytes
    transposed: dict[str, str] = field(default_factory=dict)  # name of a copy → name of its origin
    reasons: dict[str, str] = field(default_factory=dict)
    added: set[str] = field(default_factory=set)  # vectors and biases, which may be written anew
    format: str = INT8
    halved: set[str] = field(default_factory=set)  # weights that get fp16 whatever the others get

    def format_of(self, name: str) -> str:
        """Return the format of a weight."""
        return FP16 if self.format == FP16 or name in self.halved else INT8

    def count(self, graph: ir.Graph, written: set[str]) -> Coverage:
        """Count quantized and float weights: those without readers were quantized, `written` are new."""
        left = {
            self.transposed.get(name, name) for name, v in graph.initializers.items() if v.uses()
        } - written
        halved = {self.transposed.get(name, name) for name in self.halved}
        for name, (kind, values, size) in self.found.items():
            if name in left or name in self.added:
                self.coverage.add_left(
                    kind, values, size, self.reasons.get(name, f"{kind} reads it in float")
                )
            else:
                self.coverage.add_quantized(FP16 if name in halved else self.format_of(name), values, size)
        return self.coverage


def find(model: ir.Model, format: str = INT8) -> SourceWeights:
    """Turn every stored float tensor into an initializer that its readers use directly, and list them.

    Files of old exporters list their weights as inputs too, which an artifact does not take.
    """
    from onnx_ir.passes import common

    for value in [value for value in model.graph.inputs if value.is_initializer()]:
        model.graph.inputs.remove(value)
        model.ir_version = max(model.ir_version, SEPARATE_IR_VERSION)
    common.LiftConstantsToInitializersPass()(model)
    common.LiftSubgraphInitializersToMainGraphPass()(model)
    stored = SourceWeights(format=format)
    for name, value in model.graph.initializers.items():
        if value.uses() and (tensor := value.const_value) is not None and tensor.dtype.is_floating_point():
            stored.found[name] = (next(iter(value.uses())).node.op_type, tensor.size, tensor.nbytes)
            if len(tensor.shape) < 2 or all(
                use.node.op_type == "Gemm" and use.idx == 2 for use in value.uses()
            ):
                stored.added.add(name)
                stored.reasons[name] = "vectors are applied in float"
    for node in list(model.graph):
        _see_through(model.graph, node, stored)
    stored.halved = {few for node in model.graph if (few := _few_products(node)) is not None}
    return stored


def _few_products(node: ir.Node) -> str | None:
    """Return the name of the weight of a depthwise convolution, or of one that is nearly so."""
    weight = node.inputs[1] if node.domain == "" and node.op_type == "Conv" else None
    array = None if weight is None else weight_of(weight)
    few = array is not None and array[0].size < FEWEST_PRODUCTS and node.attributes.get_int("group", 1) > 1
    return None if weight is None or not few else weight.name


def _see_through(graph: ir.Graph, node: ir.Node, stored: SourceWeights) -> None:
    """Apply a Transpose or Identity of a weight at conversion time."""
    import onnx_ir as ir

    if node.domain != "" or node.op_type not in ("Transpose", "Identity"):
        return
    source, result = node.inputs[0], node.outputs[0]
    array = None if source is None else weight_of(source)
    if array is None or source is None or any(result is output for output in graph.outputs):
        return
    moved = source
    if node.op_type == "Transpose":
        order = node.attributes["perm"].as_ints() if "perm" in node.attributes else None
        moved = GraphBuilder(graph, node).constant(
            f"{result.name}/stored", np.ascontiguousarray(array.transpose(order))
        )
        name = str(source.name)
        stored.transposed[str(moved.name)] = stored.transposed.get(name, name)
    ir.convenience.replace_all_uses_with(result, moved)
    graph.remove(node, safe=True)


def weight_of(value: ir.Value) -> np.ndarray | None:
    """Return the float32 values of an initializer of at least two dimensions."""
    import onnx_ir as ir

    tensor = value.const_value
    if tensor is None or tensor.dtype != ir.DataType.FLOAT or len(tensor.shape) < 2:
        return None
    return np.asarray(tensor.numpy())


def store(graph: ir.Graph, stored: SourceWeights, values: Mapping[str, ir.Value]) -> int:
    """Store the eligible `values` as codes of `stored.format`; return their number."""
    count = 0
    for name, value in values.items():
        if not value.uses():
            continue
        array = weight_of(value)
        origin = stored.transposed.get(name, name)
        axis, reason = _axis(value, array, graph, stored.format_of(name))
        if axis is None or array is None:
            stored.reasons[origin] = reason
        else:
            _store(graph, value, array, axis, stored.format_of(name))
            count += 1
    return count


def rounded(graph: ir.Graph, stored: SourceWeights) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
    """Yield the weights that int8 is given to: name, values, and what their codes decode to."""
    for name, value in graph.initializers.items():
        if not value.uses() or name in stored.halved:  # the origin of what was transposed has no reader
            continue
        array = weight_of(value)
        axis, _ = _axis(value, array, graph, INT8)
        if axis is not None and array is not None:
            yield name, (array, decoded(*blocks(array, axis), array.shape, axis))


def _axis(value: ir.Value, array: np.ndarray | None, graph: ir.Graph, format: str) -> tuple[int | None, str]:
    """Return the axis with a scale per channel, or None and the reason why the weight stays float."""
    if array is None:
        vector = value.const_value is not None and len(value.const_value.shape) < 2
        return None, "vectors are applied in float" if vector else "it is not float32"
    if array.size < SMALLEST:
        return None, f"weight has {array.size} values; below {SMALLEST} there is too little to gain"
    if not np.isfinite(array).all():
        return None, "it holds NaN or infinity"
    if any(value is output for output in graph.outputs):
        return None, "it is an output of the model"
    axes = [_axis_of(use.node, use.idx, array, format) for use in value.uses()]
    refused = next((axis for axis in axes if isinstance(axis, str)), None)
    return (None, refused) if refused is not None else (axes[0], "")  # type: ignore[return-value]


def _axis_of(node: ir.Node, place: int, array: np.ndarray, format: str) -> int | str:
    """Return the weight axis of the reader's output channels, or the reason when there is none."""
    op, attributes = node.op_type, node.attributes
    if node.domain == "":
        if op == "Conv" and place == 1:
            return 0
        if op == "ConvTranspose" and place == 1:
            return 1
        if op in _RECURRENT and place in (1, 2):
            return 1
        if op == "Gemm" and place < 2:
            return place if not attributes.get_int("transB" if place else "transA", 0) else 1 - place
        if op == "MatMul":
            return array.ndim - 1 if place else array.ndim - 2
        if op in _MOVES and place == 0:
            return 0
        if op == "Gather" and place == 0 and format == FP16 and attributes.get_int("axis", 0) == 0:
            return 0
        states = len(node.inputs) - attributes.get_int("num_scan_inputs", 0)
        if (op == "Loop" and place > 1) or (op == "Scan" and place < states):
            return _axis_in_step(node, place, array, format)
    return f"{op} has no {format} form here"


def _axis_in_step(node: ir.Node, place: int, array: np.ndarray, format: str) -> int | str:
    """Return the axis for a weight that is handed from step to step of a Loop or Scan, by what reads it there."""
    handed = node.attributes["body"].as_graph().inputs[place]
    readers = [use for use in handed.uses() if use.node.op_type != "Identity"]
    axes = [_axis_of(use.node, use.idx, array, format) for use in readers]
    refused = next((axis for axis in axes if isinstance(axis, str)), None)
    return refused or next(iter(axes), f"no step of the {node.op_type} reads it")


def _store(graph: ir.Graph, value: ir.Value, array: np.ndarray, axis: int, format: str) -> None:
    """Let the readers of a weight read its decoded codes, by operators that are folded when the file is opened."""
    import onnx_ir as ir

    first = graph[0]
    emit = GraphBuilder(graph, first)
    emit.prefix = str(value.name)
    if format == INT8:
        codes, share, scale = blocks(array, axis)
        factor = folded(emit, f"{value.name}/share", share, emit.constant(f"{value.name}/scale", scale))
    else:
        codes, scale = halved(array, axis)
        factor = emit.constant(f"{value.name}/scale", scale)
    result = folded(emit, f"{value.name}/codes", codes, factor)
    if codes.size != array.size:
        outer, values, inner = _lines(array.shape, axis)
        lines = emit.constant(f"{value.name}/lines", np.array([outer, -1, inner], np.int64))
        result = emit.first(emit("Reshape", result, lines), values, axis=1)
    if codes.shape != array.shape:
        shape = emit.constant(f"{value.name}/shape", np.array(array.shape, np.int64))
        result = emit("Reshape", result, shape)
    result.dtype, result.shape = ir.DataType.FLOAT, ir.Shape(array.shape)
    ir.convenience.replace_all_uses_with(value, result)
    graph.insert_before(first, emit.nodes)


def blocks(array: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantize to codes int8 in ±127, a share uint8 for each block of a channel and a scale for the channel.

    Their product, of three arrays [channels, blocks, block, channels, rest] that broadcast, has the values in the order
    of `array`, and zeros at the end of the last block of a channel.
    """
    outer, values, inner = _lines(array.shape, axis)
    count = math.ceil(values / BLOCK)
    block, channels = math.ceil(values / count), 1 if inner == 1 else array.shape[axis]
    padded = np.zeros((outer, count * block, inner), array.dtype)
    padded[:, :values] = array.reshape(outer, values, inner)
    view, ours = (
        padded.reshape(outer, count, block, channels, -1),
        (1, 2, 4),
    )  # all dimensions but those of channels
    largest = np.abs(view).max(axis=(2, 4), keepdims=True)
    scale = np.maximum(largest.max(axis=ours, keepdims=True), 1e-30).astype(np.float32)
    share = np.ceil(largest / scale * STEPS).clip(1, STEPS).astype(np.uint8)
    scale /= np.float32(127 * STEPS)
    return np.rint(view / (share * scale)).clip(-127, 127).astype(np.int8), share, scale


def decoded(
    codes: np.ndarray, share: np.ndarray, scale: np.ndarray, shape: tuple[int, ...], axis: int
) -> np.ndarray:
    """Return the values float32 of a weight of `shape` that `blocks` quantized."""
    outer, values, inner = _lines(shape, axis)
    return (codes * (share * scale)).reshape(outer, -1, inner)[:, :values].reshape(shape)


def _lines(shape: tuple[int, ...], axis: int) -> tuple[int, int, int]:
    """Return a shape of which blocks divide the middle, of a weight whose output channels lie along `axis`.

    That is the dimensions after the channels, where they are a block or there is none before, else the one before.
    """
    before, after = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    if after >= BLOCK or not axis:
        return before * shape[axis], after, 1
    return before // shape[axis - 1], shape[axis - 1], shape[axis] * after


def quantized(array: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Quantize to codes int8 in ±127 and a scale per channel along `axis`, its dimensions kept."""
    others = tuple(i for i in range(array.ndim) if i != axis)
    largest = np.abs(array).max(axis=others, keepdims=True)
    scale = np.maximum(largest, 1e-30).astype(np.float32) / np.float32(127)
    return np.rint(array / scale).clip(-127, 127).astype(np.int8), scale


def halved(array: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Quantize to codes float16 in ±2 and a power of two per channel along `axis`, its dimensions kept."""
    codes, scale = halved_rows(torch.from_numpy(np.moveaxis(array, axis, 0).copy()))
    shape = [-1 if i == axis else 1 for i in range(array.ndim)]
    return np.ascontiguousarray(np.moveaxis(codes.numpy(), 0, axis)), scale.numpy().reshape(shape)


def gather(emit: GraphBuilder, array: np.ndarray) -> ir.Value:
    """Look up rows of an embedding table int8 [V, D] with per-row scales, replacing a Gather of axis 0."""
    table, ids = emit.node.inputs[0], emit.node.inputs[1]
    name = "" if table is None else table.name
    codes, scale = quantized(array, 0)
    rows = emit("Cast", emit("Gather", emit.constant(f"{name}/codes", codes), ids, axis=0), to=1)
    return emit("Mul", rows, emit("Gather", emit.constant(f"{name}/scales", scale), ids, axis=0))  # type: ignore[no-any-return]
