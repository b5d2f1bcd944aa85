"""Rows picked before the operations that work on each row alone.

A step returns the logits of few of its tokens. Written as transformers does, rows are picked before the output head,
and the last layer's output projection and feed-forward network, which only these rows need, run on all tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.export import ExportedProgram

from ..graph_pass import Rewriter
from .match import is_call

aten, own = torch.ops.aten, torch.ops.infer
_UNARY = {
    own.rms_norm.default,
    aten.layer_norm.default,
    aten.silu.default,
    aten.gelu.default,
    aten.relu.default,
    aten.sigmoid.default,
    aten.tanh.default,
}
_BINARY = {aten.add.Tensor, aten.mul.Tensor}
_PARTS = {aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default}
_VIEWS = {aten.reshape.default, aten.slice.Tensor, operator.getitem, *_PARTS}


def with_rows_picked_first(program: ExportedProgram) -> ExportedProgram:
    """Return `program` whose picked rows are picked before the layers that compute each row from itself.

    Values whose other rows something else reads stay whole. A program without such layers is returned unchanged.
    """
    mover = _Mover(program)
    return mover.program() if mover.run() else program


class _Pick(NamedTuple):
    """Call of `aten.index` that picks `rows`, int64, of one axis of `source`."""

    node: fx.Node
    source: fx.Node
    rows: fx.Node
    axis: int


class _Mover(Rewriter):
    def run(self) -> bool:
        """Move each pick of rows; return whether one has moved."""
        picks = [pick for node in self._graph.nodes if (pick := _pick_of(node)) is not None]
        moved = [self._move(pick) for pick in picks]
        return any(moved)

    def _move(self, pick: _Pick) -> bool:
        places = {pick.source: pick.axis}  # of the rows' axis
        inside = {pick.node}
        computed: list[fx.Node] = []  # what runs on picked rows, in order
        for node in reversed(list(self._graph.nodes)):
            if node not in places or not inside.issuperset(node.users):
                continue
            needed = _row_operands(node, places[node])
            if needed is None or any(places.get(n, place) != place for n, place in needed.items()):
                continue
            places |= needed
            inside.add(node)
            computed.insert(0, node)
        if not any(_is_linear(node) for node in computed):
            return False
        for node in list(computed):  # views of what is picked stay views of all rows
            if node.target in _VIEWS and node.args[0] not in inside:
                inside.remove(node)
                computed.remove(node)
        read = dict.fromkeys(n for node in computed for n in node.all_input_nodes)
        with self._graph.inserting_before(pick.node):
            given = {
                n: self._picked(n, places[n], pick.rows) for n in read if n in places and n not in inside
            }
        for node in computed:
            pick.node.prepend(node)
            node.args = fx.node.map_arg(node.args, lambda n: given.get(n, n))
            self._resize(node, places[node], pick.rows)
        pick.node.replace_all_uses_with(pick.source)
        self._graph.erase_node(pick.node)
        return True

    def _picked(self, node: fx.Node, axis: int, rows: fx.Node) -> fx.Node:
        made = self._graph.call_function(aten.index.Tensor, (node, [*[None] * axis, rows]))
        made.meta["val"] = _resized(node.meta["val"], axis, rows)
        return made

    def _resize(self, node: fx.Node, axis: int, rows: fx.Node) -> None:
        if node.target is aten.reshape.default:
            shape = [size if isinstance(size, int) else -1 for size in node.meta["val"].shape]
            node.args = (node.args[0], shape)
        value = node.meta["val"]
        parts = isinstance(value, (list, tuple))
        node.meta["val"] = [_resized(v, axis, rows) for v in value] if parts else _resized(value, axis, rows)


def _pick_of(node: Any) -> _Pick | None:
    """Return the pick that a node is: the rows are an input of the program, and their axis is not the last."""
    if not is_call(node, aten.index.Tensor):
        return None
    source, (*before, rows) = node.args
    if any(i is not None for i in before) or not isinstance(rows, fx.Node) or rows.op != "placeholder":
        return None
    value = rows.meta["val"]
    plain = value.dtype == torch.int64 and value.dim() == 1 and source.meta["val"].dim() > len(before) + 1
    return _Pick(node, source, rows, len(before)) if plain else None


def _resized(value: torch.Tensor, axis: int, rows: fx.Node) -> torch.Tensor:
    shape = list(value.shape)
    shape[axis] = rows.meta["val"].shape[0]
    return value.new_empty(shape)


def _is_linear(node: fx.Node) -> bool:
    name = getattr(getattr(node.target, "_schema", None), "name", "").rpartition("::")[2]
    return name.startswith("linear_") and name.endswith("_packed")


def _row_operands(node: fx.Node, axis: int) -> dict[fx.Node, int] | None:
    """Return the operands that `node` computes each row from, with the place of the rows' axis; None for others.

    `axis`: that of the rows in the result, not the last.
    """
    value, first = node.meta.get("val"), node.args[0] if node.args else None
    if node.op != "call_function" or not isinstance(first, fx.Node):
        return None
    rank = (value[0] if isinstance(value, (list, tuple)) else value).dim()  # type: ignore[union-attr]
    if axis >= rank - 1:
        return None
    if node.target in _UNARY or _is_linear(node) or node.target is operator.getitem:
        return {first: axis}
    if node.target is aten.slice.Tensor:
        return {first: axis} if node.args[1] % rank != axis else None
    if node.target in _PARTS:
        along = node.args[2] if len(node.args) > 2 else 0
        return {first: axis} if along % rank != axis else None
    if node.target is aten.reshape.default:
        place = _reshaped_axis(first.meta["val"].shape, node.meta["val"].shape, axis)
        return None if place is None else {first: place}
    if node.target in _BINARY and not node.kwargs:
        return _broadcast_operands(node, axis)
    return None


def _broadcast_operands(node: fx.Node, axis: int) -> dict[fx.Node, int] | None:
    shape, found = node.meta["val"].shape, {}
    for operand in node.args:
        if not isinstance(operand, fx.Node):
            continue
        value = operand.meta["val"]
        if not isinstance(value, torch.Tensor):
            return None
        place = axis - (len(shape) - value.dim())
        if place >= 0 and str(value.shape[place]) == str(shape[axis]):
            found[operand] = place
        elif place >= 0 and value.shape[place] != 1:
            return None
    return found or None


def _reshaped_axis(before: Sequence[Any], after: Sequence[Any], axis: int) -> int | None:
    """Return the axis of `before` that is `axis` of `after`, where only sizes of one precede both."""
    if isinstance(after[axis], int) or any(size != 1 for size in after[:axis]):
        return None
    places = [i for i, size in enumerate(before) if str(size) == str(after[axis])]
    if len(places) != 1 or any(size != 1 for size in before[: places[0]]):
        return None
    rest = [*before[places[0] + 1 :], *after[axis + 1 :]]
    return places[0] if all(isinstance(size, int) for size in rest) else None
