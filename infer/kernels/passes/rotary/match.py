"""Recognition of a rotary embedding in a captured program, whatever its modelling code wrote it as.

The operators between heads and their rotated form are sums, products and views. So they are run on small integers,
which every float type holds exactly with their products, and compared with `rotated`: equal numbers for random heads
and random cosines mean equal functions. Nothing is concluded from names or from the order of operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from .form import HALVES, INTERLEAVED, INTERLEAVED_TO_HALVES, RotaryForm, rotated

aten = torch.ops.aten
TOKENS = 3  # of a trial
_MOST_NODES = 64  # between heads and their rotated form
_VIEWS = (
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.flatten.using_ints),
    *(aten.unflatten.int, aten.transpose.int, aten.permute.default, aten.select.int, aten.slice.Tensor),
    *(aten.squeeze.dim, aten.unsqueeze.default, aten.split.Tensor, aten.split_with_sizes.default),
    *(aten.chunk.default, aten.unbind.int, aten.expand.default, aten.repeat_interleave.self_int),
    *(aten.clone.default, aten.contiguous.default, aten.alias.default, aten.detach.default),
    *(
        aten.view_as_real.default,
        aten.view_as_complex.default,
        aten.pad.default,
        aten.constant_pad_nd.default,
    ),
)
_SUMS = (
    aten.cat.default,
    aten.stack.default,
    aten.neg.default,
    aten.mul.Tensor,
    aten.add.Tensor,
    aten.sub.Tensor,
)
_CASTS = (
    *(aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default, aten.type_as.default),
    aten.to.other,
)
_GETITEM = "getitem"


class Rotation(NamedTuple):
    """Heads before their rotation, the nodes of cosines and sines (one complex node of both), and the form."""

    heads: fx.Node
    cos: fx.Node
    sin: fx.Node | None
    form: RotaryForm


class _Between(NamedTuple):
    """Operators from `heads` to the rotated heads, in order, and the other tensors that they read."""

    heads: fx.Node
    nodes: list[fx.Node]
    sides: list[fx.Node]


def rotation_of(result: fx.Node) -> Rotation | str | None:
    """Return how heads [T, H, D] come from a rotation; a reason if they do not, None if nothing is multiplied."""
    reached = _reached(result)
    if not any(node.target is aten.mul.Tensor and _is_between(node) for node in reached):
        return None
    for heads in sorted(reached):  # the earliest first: it leaves the fewest operators before
        if heads is result or not _same_heads(heads, result):
            continue
        between = _between(heads, result, reached)
        if between is not None and (found := _rotation(between, result)) is not None:
            return found
    return "queries or keys are not one tensor rotated by cosines and sines that its heads share"


def _reached(result: fx.Node) -> set[fx.Node]:
    """Return the nodes that `result` is computed from by sums, products and views, with those they begin at."""
    found, todo = {result}, [result]
    while todo and len(found) < _MOST_NODES:
        node = todo.pop(0)
        for other in node.all_input_nodes if _is_between(node) else ():
            if other not in found:
                found.add(other)
                todo.append(other)
    return found


def _is_between(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    return node.target in (*_VIEWS, *_SUMS, *_CASTS) or getattr(node.target, "__name__", "") == _GETITEM


def _between(heads: fx.Node, result: fx.Node, reached: set[fx.Node]) -> _Between | None:
    nodes: list[fx.Node] = []
    depends, sides = {heads}, dict[fx.Node, None]()
    for node in sorted(reached):
        if node <= heads or not any(other in depends for other in node.all_input_nodes):
            continue
        if not _is_between(node):
            return None
        depends.add(node)
        nodes.append(node)
        sides.update(
            (other, None) for other in node.all_input_nodes if other not in depends and _is_tensor(other)
        )
    if result not in depends:
        return None
    return _Between(heads, nodes, [side for side in sides if side not in depends])


def _rotation(between: _Between, result: fx.Node) -> Rotation | None:
    """Try every form that the sizes of cosines and sines allow."""
    trial = _Trial(between, result)
    columns = [trial.columns_of(side) for side in between.sides]
    if not columns or len(columns) > 2 or None in columns or len(set(columns)) > 1 or not trial.possible():
        return None
    width = int(_value(result).shape[-1])
    for form in _forms(width, int(columns[0] or 0)):
        for cos, sin in trial.pairs():
            if trial.equals(form, cos, sin):
                return Rotation(between.heads, cos, sin, form)
    return None


def _forms(width: int, columns: int) -> Iterator[RotaryForm]:
    for rotated_width in (columns, 2 * columns):
        if rotated_width % 2 == 0 and 2 <= rotated_width <= width:
            for start in sorted({0, width - rotated_width}):
                for order in (HALVES, INTERLEAVED, INTERLEAVED_TO_HALVES):
                    yield RotaryForm(start, rotated_width, order)


class _Trial:
    """Random integers for heads, cosines and sines, and the program's result on them."""

    def __init__(self, between: _Between, result: fx.Node) -> None:
        self._between, self._result = between, result
        self._tokens = _value(result).shape[0]
        generator = torch.Generator().manual_seed(0)
        _, heads, width = _value(result).shape
        self._x = torch.randint(-8, 9, (TOKENS, heads, width), generator=generator).float()
        self._sides = {}
        for side in between.sides:
            columns = self.columns_of(side) or 0
            parts = torch.randint(-8, 9, (2, TOKENS, columns), generator=generator).float()
            self._sides[side] = torch.complex(*parts) if _value(side).is_complex() else parts[0]
        self._found: Tensor | None = None

    def columns_of(self, side: fx.Node) -> int | None:
        """Return the numbers of a token in a tensor that all heads share; None for other shapes."""
        *lead, width = _value(side).shape
        if not isinstance(width, int) or sum(not isinstance(size, int) for size in lead) != 1:
            return None
        shared = all(size == 1 if isinstance(size, int) else self._is_tokens(size) for size in lead)
        return width if shared else None

    def pairs(self) -> Iterator[tuple[fx.Node, fx.Node | None]]:
        """Yield the tensors of cosines and sines in both roles; of complex numbers the one tensor."""
        sides = self._between.sides
        if len(sides) == 1:
            if _value(sides[0]).is_complex():
                yield sides[0], None
            return
        yield sides[0], sides[1]
        yield sides[1], sides[0]

    def possible(self) -> bool:
        """Run the program's operators; false where one of them reads what is not known here."""
        values: dict[fx.Node, Any] = {self._between.heads: self._laid_out(self._between.heads, self._x)}
        for side, numbers in self._sides.items():
            values[side] = self._laid_out(side, numbers[:, None])
        for node in self._between.nodes:
            try:
                values[node] = self._run(node, values)
            except (RuntimeError, ValueError, TypeError, IndexError, KeyError):
                return False
        self._found = values[self._result].float()
        return True

    def equals(self, form: RotaryForm, cos: fx.Node, sin: fx.Node | None) -> bool:
        """Tell if the program rotates by this form."""
        numbers = self._sides[cos]
        pair = (numbers, self._sides[sin]) if sin is not None else (numbers.real, numbers.imag)
        if form.refuses(self._x.shape[2], pair[0].shape[1]) is not None or self._found is None:
            return False
        want = rotated(self._x, *pair, form)
        return self._found.shape == want.shape and torch.equal(self._found, want)

    def _laid_out(self, node: fx.Node, numbers: Tensor) -> Tensor:
        """Return numbers [T, H, D] in the shape and dtype of a node, whose tokens may lie behind its heads."""
        tensor = _value(node)
        shape = [size if isinstance(size, int) else TOKENS for size in tensor.shape]
        axis = tokens_axis(tensor)
        rest = shape[:axis] + shape[axis + 1 :]
        return numbers.reshape(TOKENS, *rest).movedim(0, axis).to(tensor.dtype)

    def _run(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        args, kwargs = pytree.tree_map_only(
            fx.Node, lambda n: self._known(n, values), (node.args, node.kwargs)
        )
        if node.target in _CASTS:
            kind = node.meta["val"].dtype
            if not (kind.is_floating_point or kind.is_complex):
                raise ValueError(f"a cast to {kind}")
            return args[0].to(kind)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _known(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        if node in values:
            return values[node]
        size = node.meta["val"]
        if isinstance(size, int) or self._is_tokens(size):
            return size if isinstance(size, int) else TOKENS
        raise ValueError(f"{node} is not known")

    def _is_tokens(self, size: Any) -> bool:
        return isinstance(size, torch.SymInt) and str(size) == str(self._tokens)


def tokens_axis(tensor: Tensor) -> int:
    """Return the axis whose size is a symbol."""
    return next(axis for axis, size in enumerate(tensor.shape) if not isinstance(size, int))


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _value(node: fx.Node) -> Tensor:
    """Return the metadata of a node that is a tensor."""
    value: Tensor = node.meta["val"]
    return value


def _same_heads(node: fx.Node, result: fx.Node) -> bool:
    """Tell if a node has the dtype and, but for axes of one and their order, the shape of the result."""
    if not _is_tensor(node):
        return False
    value, want = _value(node), _value(result)
    if value.dtype != want.dtype or value.dim() < 3 or value.shape[-1] != want.shape[-1]:
        return False
    lead = [size for size in value.shape[:-1] if not (isinstance(size, int) and size == 1)]
    wanted = [size for size in want.shape[:-1] if not (isinstance(size, int) and size == 1)]
    return sorted(map(str, lead)) == sorted(map(str, wanted))
