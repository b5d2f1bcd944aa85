"""Fusion of static int8 convolutions in a captured program that is lowered for the CPU.

A value between convolutions becomes an image of bytes (`conv2d_packed.py`) on the grid that the next convolution was
calibrated for: the convolution before it adds the residual, clamps and rounds in one pass. What is never negative
uses all 255 steps of the same range. Floats enter a chain by `conv2d_int8_image` and leave it by
`conv2d_int8_packed_float`; between them a max-pool may stand.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from ...library_errors import quiet
from ..cpu.conv_weight_layout import ConvPacking
from ..ops.conv2d_packed import stored_channels
from .conv_chains import Conv, ConvChains, fusable
from .conv_nodes import is_pool, never_negative, pool_window

LEVELS, BYTES = 127, 255
SIGNED_ZERO = 128


@dataclass(frozen=True)
class Image:
    """A float value as bytes."""

    node: fx.Node
    poison: fx.Node
    step: float
    zero: int
    border: int


def fuse_convolutions(program: ExportedProgram) -> tuple[ExportedProgram, list[ConvPacking]]:
    """Return a program with fused static int8 convolutions, and the packing of their operands."""
    if not any(fusable(node) for node in program.graph.nodes):
        return program, []
    with quiet():
        program = program.run_decompositions({})  # in-place operators become plain ones
    rewriter = _Fusion(program)
    rewriter.run()
    return rewriter.program(), rewriter.packings


class _Fusion(ConvChains):
    def __init__(self, program: ExportedProgram) -> None:
        super().__init__(program)
        self.packings: list[ConvPacking] = []
        self._images: dict[tuple[fx.Node, float], Image] = {}
        self._shared: dict[fx.Node, Image] = {}
        self._positive: set[fx.Node] = set()

    def run(self) -> None:
        ends = {conv.end: conv for conv in self._convs.values()}
        for node in list(self._graph.nodes):
            if node in ends:
                self._emit(ends[node])
            elif is_pool(node) and self._becomes_image(node):
                self._emit_pool(node)
        self._graph.eliminate_dead_code()
        self._drop_unused()

    def _grid(self, value: fx.Node, step: float) -> tuple[float, int, int]:
        """Return step, zero point and lowest byte of a value's int8 grid."""
        if value in self._positive or never_negative(value):
            return step * LEVELS / BYTES, 0, 0
        return step, SIGNED_ZERO, SIGNED_ZERO - LEVELS

    def _call(self, op: Any, *args: Any) -> fx.Node:
        node = self._graph.call_function(op, args)
        node.meta["val"] = op(*fx.node.map_arg(args, lambda n: n.meta["val"]))
        return node

    def _image(self, value: fx.Node, step: float) -> Image:
        """Return the bytes of `value`: made by the operator that computes it, or here from its floats."""
        if value in self._shared:
            return self._shared[value]
        if (value, step) not in self._images:
            fine, zero, low = self._grid(value, step)
            border, channels = self._border(value), stored_channels(int(value.meta["val"].shape[1]))
            made = self._call(
                torch.ops.infer.conv2d_int8_image.default, value, fine, zero, low, border, channels
            )
            parts = []
            for i in (0, 1):
                part = self._graph.call_function(operator.getitem, (made, i))
                part.meta["val"] = made.meta["val"][i]
                parts.append(part)
            self._images[value, step] = Image(parts[0], parts[1], fine, zero, border)
        return self._images[value, step]

    def _emit(self, conv: Conv) -> None:
        with self._graph.inserting_before(conv.end.next):
            self._emit_here(conv)

    def _emit_here(self, conv: Conv) -> None:
        x = self._image(conv.x, conv.step)
        residual = None if conv.residual is None else self._image(conv.residual, conv.residual_step)
        poison = x.poison
        if residual is not None and residual.poison is not poison:
            poison = self._call(torch.ops.aten.add.Tensor, poison, residual.poison)
        is_image = self._becomes_image(conv.end)
        step, zero, lowest = self._grid(conv.end, self._step(conv.end, self._only_user(conv.end)) or 1.0)
        if not is_image:
            step, zero = 1.0, 0
        factor = residual.step / step if residual else 0.0
        low, high = conv.low / step + zero, conv.high / step + zero
        borders = [x.border, residual.border if residual else 0, self._border(conv.end) if is_image else 0]
        packing = ConvPacking(
            f"conv_{len(self.packings)}",
            *(conv.names["codes"], conv.names["scale"], conv.names.get("bias")),
            stored=int(x.node.meta["val"].shape[3]),
            x_step=x.step,
            x_zero=x.zero,
            out_step=step,
            out_zero=zero,
            shift=-residual.zero * factor if residual else 0.0,
        )
        self.packings.append(packing)
        shapes = packing.shapes(self._tensors[packing.codes])
        like = conv.node.meta["val"]
        operands = [self._operand(n, *shape, like) for n, shape in zip(packing.parts, shapes, strict=True)]
        first = (x.node, *operands, residual.node if residual else None, factor)
        if is_image:
            limits = (max(low, lowest), min(high, BYTES))
            y = self._call(
                torch.ops.infer.conv2d_int8_packed.default,
                *(*first, *limits, conv.rows, conv.window, borders, zero),
            )
            self._shared[conv.end] = Image(y, poison, step, zero, borders[2])
            return
        y = self._call(
            torch.ops.infer.conv2d_int8_packed_float.default,
            *(*first, low, high, conv.rows, conv.window, borders, poison),
        )
        y = self._call(torch.ops.aten.permute.default, y, [0, 3, 1, 2])
        if never_negative(conv.end):
            self._positive.add(y)
        conv.end.replace_all_uses_with(y)
        self._moved(conv.end, y)

    def _emit_pool(self, node: fx.Node) -> None:
        step = self._step(node)
        source: Any = node.args[0]
        with self._graph.inserting_before(node):
            x = self._image(source, step or 0)
            border = self._border(node)
            y = self._call(
                torch.ops.infer.conv2d_int8_max_pool.default,
                *(x.node, pool_window(node), [x.border, 0, border], x.zero),
            )
        self._shared[node] = Image(y, x.poison, x.step, x.zero, border)
