"""Fusion of static int8 convolutions in a captured program that is lowered for the CPU.

A value between convolutions becomes an image of bytes (`conv2d_packed.py`) on the grid that the next convolution was
calibrated for: the convolution before it adds the residual, clamps and rounds in one pass. What is never negative
uses all 255 steps of the same range. Floats enter a chain by `conv2d_int8_image` and leave it by
`conv2d_int8_packed_float`; between them a max-pool may stand.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from ...silence_logs import quiet
from ..cpu.conv_weight_layout import ConvPacking
from ..ops.conv2d_packed import MOST_TAPS, QUAD, stored_channels
from .conv_nodes import ADD, CONV, bounds, is_pool, never_negative, other_operand, pool_window
from .graph_pass import Rewriter

LEVELS, BYTES = 127, 255
SIGNED_ZERO = 128


@dataclass
class Conv:
    """A convolution, and what is done to its result before it is rounded: residual, then clamp."""

    node: fx.Node
    names: dict[str, str]
    step: float
    y_step: float | None
    rows: int
    window: list[int]
    residual: fx.Node | None = None
    residual_step: float = 0.0
    low: float = -math.inf
    high: float = math.inf
    end: fx.Node = field(init=False)  # the value after all that

    def __post_init__(self) -> None:
        self.end = self.node

    @property
    def x(self) -> fx.Node:
        return self.node.args[0]  # type: ignore[return-value]


@dataclass(frozen=True)
class Image:
    """A float value as bytes."""

    node: fx.Node
    poison: fx.Node
    step: float
    zero: int
    border: int


def fusable(node: fx.Node) -> bool:
    """Tell if the native kernels compute this convolution; grouped ones stay with the portable operator."""
    if node.op != "call_function" or str(node.target) != CONV:
        return False
    value, codes = node.meta["val"], node.args[1].meta["val"]  # type: ignore[union-attr]
    groups = node.kwargs.get("groups", node.args[8] if len(node.args) > 8 else 1)
    plain = value.device.type == "cpu" and value.dtype == torch.float32 and groups == 1
    return bool(plain and codes.shape[2] * codes.shape[3] <= MOST_TAPS and codes.numel() > 0)


def fuse_convolutions(program: ExportedProgram) -> tuple[ExportedProgram, list[ConvPacking]]:
    """Return a program with fused static int8 convolutions, and what their operands are packed from."""
    if not any(fusable(node) for node in program.graph.nodes):
        return program, []
    with quiet():
        program = program.run_decompositions({})  # in-place operators become plain ones
    rewriter = _Fusion(program)
    rewriter.run()
    return rewriter.program(), rewriter.packings


class _Fusion(Rewriter):
    def __init__(self, program: ExportedProgram) -> None:
        super().__init__(program)
        self.packings: list[ConvPacking] = []
        self._convs = {n: conv for n in self._graph.nodes if fusable(n) and (conv := self._conv(n))}
        self._residuals: dict[fx.Node, fx.Node] = {}  # add → its operand that is read as an image
        self._images: dict[tuple[fx.Node, float], Image] = {}
        self._shared: dict[fx.Node, Image] = {}
        self._positive: set[fx.Node] = set()

    def run(self) -> None:
        for conv in reversed(self._convs.values()):  # of two convolutions that are added the later one adds
            self._extend(conv)
        ends = {conv.end: conv for conv in self._convs.values()}
        for node in list(self._graph.nodes):
            if node in ends:
                self._emit(ends[node])
            elif is_pool(node) and self._becomes_image(node):
                self._emit_pool(node)
        self._graph.eliminate_dead_code()
        self._drop_unused()

    def _conv(self, node: fx.Node) -> Conv | None:
        names = self._names_of(node)
        if "" in names.values():
            return None
        given: Any = node.normalized_arguments(self._module, normalize_to_only_use_kwargs=True)  # type: ignore[arg-type]
        options = given.kwargs
        codes = self._tensors[names["codes"]]
        window = [*codes.shape[2:], *options["stride"], *options["padding"], *options["dilation"]]
        y_step = float(self._tensors[names["y_scale"]]) if "y_scale" in names else None
        step = float(self._tensors[names["x_scale"]])
        return Conv(node, names, step, y_step, codes.shape[0], [int(size) for size in window])

    def _extend(self, conv: Conv) -> None:
        """Take the addition and the clamp that follow into the convolution."""
        user = self._only_user(conv.end)
        if user is not None and str(user.target) == ADD and user not in self._residuals:
            other = other_operand(user, conv.end)
            step = None if other is None or conv.rows <= QUAD else self._step(other, user)
            if other is not None and step is not None:
                conv.residual, conv.residual_step, conv.end = other, step, user
                self._residuals[user] = other
        user = self._only_user(conv.end)
        limits = bounds(user) if user is not None else None
        if user is not None and limits is not None:
            conv.low, conv.high = limits
            conv.end = user

    @staticmethod
    def _only_user(node: fx.Node) -> fx.Node | None:
        return next(iter(node.users)) if len(node.users) == 1 else None

    def _step(self, value: fx.Node, adder: fx.Node | None = None) -> float | None:
        """Return the one step that the convolutions reading `value` share, or that of one that is only added."""
        steps = {self._convs[user].step for user in value.users if self._reads(user, value)}
        steps |= {s for user in value.users if is_pool(user) and (s := self._step(user)) is not None}
        if not steps and value in self._convs and list(value.users) == [adder]:
            return self._convs[value].y_step
        return steps.pop() if len(steps) == 1 else None

    def _reads(self, user: fx.Node, value: fx.Node) -> bool:
        return user in self._convs and self._convs[user].x is value

    def _becomes_image(self, value: fx.Node) -> bool:
        """Tell if all readers of a value read bytes of one step, so that it need not exist in float."""
        adder = self._only_user(value)
        return self._step(value, adder) is not None and all(
            self._reads(user, value)
            or self._residuals.get(user) is value
            or (is_pool(user) and self._becomes_image(user))
            for user in value.users
        )

    def _border(self, value: fx.Node) -> int:
        """Return the widest padding of the convolutions that read `value`."""
        return max(
            (max(self._convs[user].window[4:6]) for user in value.users if self._reads(user, value)),
            default=0,
        )

    def _grid(self, value: fx.Node, step: float) -> tuple[float, int, int]:
        """Step, zero and lowest byte."""
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

    def _moved(self, old: fx.Node, new: fx.Node) -> None:
        """Convolutions and additions that read `old` read `new` from here on."""
        for adder, operand in list(self._residuals.items()):
            if operand is old:
                self._residuals[adder] = new
        for conv in self._convs.values():
            if conv.residual is old:
                conv.residual = new

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
