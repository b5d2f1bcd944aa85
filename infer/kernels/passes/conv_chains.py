"""Chains of static int8 convolutions: what follows each one, and which values between them need no floats."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from ..ops.conv2d_packed import MOST_TAPS, QUAD
from .conv_nodes import ADD, CONV, bounds, is_pool, other_operand
from .graph_pass import Rewriter


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


def fusable(node: fx.Node) -> bool:
    """Tell if the native kernels compute this convolution; grouped ones stay with the portable operator."""
    if node.op != "call_function" or str(node.target) != CONV:
        return False
    value, codes = node.meta["val"], node.args[1].meta["val"]  # type: ignore[union-attr]
    groups = node.kwargs.get("groups", node.args[8] if len(node.args) > 8 else 1)
    plain = value.device.type == "cpu" and value.dtype == torch.float32 and groups == 1
    return bool(plain and codes.shape[2] * codes.shape[3] <= MOST_TAPS and codes.numel() > 0)


class ConvChains(Rewriter):
    """Rewriter that knows the convolutions of a program, the additions and clamps they take in, and their readers."""

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__(program)
        self._convs = {n: conv for n in self._graph.nodes if fusable(n) and (conv := self._conv(n))}
        self._residuals: dict[fx.Node, fx.Node] = {}  # add → its operand that is read as an image
        for conv in reversed(self._convs.values()):  # of two convolutions that are added the later one adds
            self._extend(conv)

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
        """Fuse the addition and the clamp that follow a convolution into it."""
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
        """Return the activation scale shared by the convolutions that read `value`, or that of its residual use."""
        steps = {self._convs[user].step for user in value.users if self._reads(user, value)}
        steps |= {s for user in value.users if is_pool(user) and (s := self._step(user)) is not None}
        if not steps and value in self._convs and list(value.users) == [adder]:
            return self._convs[value].y_step
        return steps.pop() if len(steps) == 1 else None

    def _reads(self, user: fx.Node, value: fx.Node) -> bool:
        return user in self._convs and self._convs[user].x is value

    def _becomes_image(self, value: fx.Node) -> bool:
        """Return true if all readers of a value take int8 of one scale, so that it need not exist in float."""
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

    def _moved(self, old: fx.Node, new: fx.Node) -> None:
        """Replace the residual operand `old` of convolutions and additions by `new`."""
        for adder, operand in list(self._residuals.items()):
            if operand is old:
                self._residuals[adder] = new
        for conv in self._convs.values():
            if conv.residual is old:
                conv.residual = new
