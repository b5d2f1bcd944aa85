"""Values of a fused program, rows of a captured step's tensors, and the views through which the graph reads them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from .match import ENDLESS, is_call

aten = torch.ops.aten
ROW, TEAM = 0, 1  # how a value is made: row after row, or by all threads together
ONE, BATCH, TOKENS, HEADS, COLUMNS = "1", "batch", "tokens", "heads", "columns"


@dataclass(eq=False)
class Value:
    """Dense float32 [rows, width].

    `node` is the tensor of the graph, which besides has only sizes of one; or several sizes that count the rows: `lead`
    of them.
    """

    node: fx.Node
    domain: str  # the number of rows, as a symbol or several
    width: int
    kind: int = ROW
    inside: bool = True  # made by a chain
    direct: bool = False  # a linear layer made it
    lead: int = 0


@dataclass(frozen=True)
class View:
    """Columns of a value, perhaps in heads that lie `stride` apart; `axes` says what each axis of the tensor is."""

    value: Value
    axes: tuple[str, ...]
    width: int  # of a head, or of all columns
    offset: int = 0
    heads: int = 1
    stride: int = 0

    @property
    def dense(self) -> bool:
        return self.heads == 1 or self.stride == self.width

    @property
    def columns(self) -> int:
        return self.heads * self.width

    def is_rows(self) -> bool:
        """Tell if the tensor is [1…, tokens, columns] or [batch…, tokens, columns]."""
        return self.axes[-2:] == (TOKENS, COLUMNS) and self.in_order()

    def in_order(self) -> bool:
        """Tell if the axes before the tokens leave the rows in their order."""
        return set(self.axes[: self.axes.index(TOKENS)]) <= {ONE, BATCH}


@dataclass
class Views:
    """Views of each node."""

    known: dict[fx.Node, View] = field(default_factory=dict)
    parts: dict[fx.Node, list[View]] = field(default_factory=dict)  # of split and chunk

    def follow(self, node: Any) -> bool:
        """Record `node` as a view of another node's value; return true if it is one."""
        if node.target is not None and getattr(node.target, "__name__", "") == "getitem":
            source, index = node.args
            if source in self.parts:
                self.known[node] = self.parts[source][index]
                return True
            return False
        if not node.args or not isinstance(node.args[0], fx.Node):
            return False
        view = self.known.get(node.args[0])
        if view is None:
            return False
        made = _follow(view, node)
        if isinstance(made, list):
            self.parts[node] = made
        elif made is not None:
            self.known[node] = made
        return made is not None


def _follow(view: View, node: Any) -> View | list[View] | None:
    target, args, rank = node.target, node.args[1:], len(view.axes)
    if target in (aten.view.default, aten.reshape.default, aten._unsafe_view.default):
        return _reshaped(view, node)
    if target is aten.flatten.using_ints or target is aten.unflatten.int:
        return _reshaped(view, node)
    if target is aten.transpose.int:
        a, b = (axis % rank for axis in args)
        axes = list(view.axes)
        axes[a], axes[b] = axes[b], axes[a]
        return replace(view, axes=tuple(axes))
    if target is aten.permute.default:
        return replace(view, axes=tuple(view.axes[axis % rank] for axis in args[0]))
    if target in (aten.select.int, aten.squeeze.dim):
        axis = args[0] % rank
        if view.axes[axis] != ONE or (target is aten.select.int and args[1] != 0):
            return None
        return replace(view, axes=view.axes[:axis] + view.axes[axis + 1 :])
    if target is aten.unsqueeze.default:
        axis = args[0] % (rank + 1)
        return replace(view, axes=(*view.axes[:axis], ONE, *view.axes[axis:]))
    if target is aten.slice.Tensor:
        axis, begin, end = (*args, *(0, 0, ENDLESS)[len(args) :])[:3]
        if len(args) > 3 or not isinstance(begin, int) or not isinstance(end, int):
            return None
        return _cut(view, axis % rank, begin, end)
    if target in (aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default):
        return _split(view, node)
    return None


def _split(view: View, node: Any) -> list[View] | None:
    axis = node.args[2] if len(node.args) > 2 else 0
    begin, made = 0, []
    for part in node.meta["val"]:
        size = part.shape[axis]
        cut = _cut(view, axis % len(view.axes), begin, begin + size) if isinstance(size, int) else None
        if cut is None:
            return None
        made.append(cut)
        begin += size
    return made


def _cut(view: View, axis: int, begin: int, end: int) -> View | None:
    """Slice the last axis, which is the columns or the width of a head."""
    if axis != len(view.axes) - 1 or view.axes[axis] != COLUMNS:
        return None
    begin = begin % view.width if begin < 0 else min(begin, view.width)
    end = end % view.width if end < 0 else min(end, view.width)
    return replace(view, offset=view.offset + begin, width=max(end - begin, 0))


def _reshaped(view: View, node: Any) -> View | None:
    """Reshape [1…, tokens, …]: split columns into heads, or join heads to columns."""
    shape = node.meta["val"].shape
    if view.value.lead > 1:
        return _reshaped_batches(view, node)
    places = [i for i, size in enumerate(shape) if str(size) == view.value.domain]
    last = [axis for axis in view.axes if axis != ONE]
    if len(places) != 1 or last not in ([TOKENS, COLUMNS], [TOKENS, HEADS, COLUMNS]):
        return None
    if any(size != 1 for size in shape[: places[0]]):
        return None
    ones, rest = (ONE,) * places[0], [int(size) for size in shape[places[0] + 1 :]]
    if len(rest) == 1 and view.dense and rest[0] == view.columns:
        return replace(view, axes=(*ones, TOKENS, COLUMNS), width=view.columns, heads=1, stride=0)
    if len(rest) != 2:
        return None
    if (rest[0], rest[1]) == (view.heads, view.width) and HEADS in view.axes:
        return replace(view, axes=(*ones, TOKENS, HEADS, COLUMNS))
    if view.dense and rest[0] * rest[1] == view.columns:
        return replace(
            view, axes=(*ones, TOKENS, HEADS, COLUMNS), heads=rest[0], width=rest[1], stride=rest[1]
        )
    return None


def _reshaped_batches(view: View, node: Any) -> View | None:
    """Reshape [batch…, tokens, …], or leave it unchanged."""
    before, after = ([str(size) for size in n.meta["val"].shape] for n in (node.args[0], node))
    if before == after:
        return view
    lead, batches = view.value.lead, (BATCH,) * (view.value.lead - 1)
    if (
        ",".join(after[:lead]) != view.value.domain
        or view.axes[:lead] != (*batches, TOKENS)
        or not view.dense
    ):
        return None
    rest = [int(size) if size.isdigit() else 0 for size in after[lead:]]
    if rest == [view.columns]:
        axes = (*batches, TOKENS, COLUMNS)
        return replace(view, axes=axes, width=view.columns, heads=1, stride=0)
    if len(rest) == 2 and rest[0] * rest[1] == view.columns:
        axes = (*batches, TOKENS, HEADS, COLUMNS)
        return replace(view, axes=axes, heads=rest[0], width=rest[1], stride=rest[1])
    return None


def outside(node: Any, *, flat: bool) -> View | None:
    """Return a view of a float32 CPU tensor from outside: [batch…, tokens, columns].

    Where the program is `flat`: [1…, tokens, columns] or [1…, tokens, heads, width] with one size that is a symbol.
    """
    if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    while flat and is_call(node, aten.unsqueeze.default, aten.squeeze.dim):
        node = node.args[0]
    tensor = node.meta["val"]
    if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
        return None
    return _tokens(node, tensor.shape) if flat else _batches(node, tensor.shape)


def _tokens(node: fx.Node, shape: torch.Size) -> View | None:
    places = [i for i, size in enumerate(shape) if not isinstance(size, int)]
    if len(places) != 1 or any(size != 1 for size in shape[: places[0]]):
        return None
    rest = [int(size) for size in shape[places[0] + 1 :]]
    if not 1 <= len(rest) <= 2:
        return None
    width = rest[0] * rest[-1] if len(rest) == 2 else rest[0]
    value = Value(node, str(shape[places[0]]), width, inside=False)
    ones = (ONE,) * places[0]
    if len(rest) == 1:
        return View(value, (*ones, TOKENS, COLUMNS), width)
    return View(value, (*ones, TOKENS, HEADS, COLUMNS), rest[1], 0, rest[0], rest[1])


def _batches(node: fx.Node, shape: torch.Size) -> View | None:
    *lead, width = shape or (0,)
    if not lead or not isinstance(width, int) or not width:
        return None
    value = Value(node, ",".join(map(str, lead)), width, inside=False, lead=len(lead))
    return View(value, (*(BATCH,) * (len(lead) - 1), TOKENS, COLUMNS), width)
