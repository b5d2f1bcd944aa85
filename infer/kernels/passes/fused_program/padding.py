"""Rows of padding that are not read, which a fused program need not compute.

An encoder's padding reaches other tokens only through attention, which hides it. Where besides all that reads the
hidden states multiplies them by the mask, replaces them where it is 0, or picks the first or a real token, rows of
padding may be left out: the program then runs on the real tokens of all sequences, packed one behind the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from .match import is_call
from .operations import Operation

aten = torch.ops.aten
_VIEWS = (
    aten.unsqueeze.default,
    aten.expand.default,
    aten.view.default,
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten._to_copy.default,
    aten.clone.default,
    aten.alias.default,
)

ATTENTION_COST = 2.4  # time of a multiplication in float32 attention, in those of an int8 linear layer
SIZES = (
    "packed_rows"  # meta of a chain that leaves out padding: multiplications of its layers, and of attention
)
LEAST_SHARE = 0.9  # of the multiplications in linear layers that chains without padding must have


def padding_of(
    operations: Sequence[Operation], given: Sequence[fx.Node], looks: Callable[[fx.Node], bool]
) -> fx.Node | None:
    """Return the int64 [batch, tokens] input that is 0 for padding, if nothing reads rows of padding; else None.

    `given`: the nodes that are read outside; `looks`: whether a node is a view of such rows.
    """
    masks = {o.read[0] if o.read else None for o in operations if o.name == "attend_all"}
    if len(masks) != 1 or None in masks or any(o.name == "attend" for o in operations):
        return None
    found = _inputs_behind(next(iter(masks)), operations[-1].result.value.domain)
    if len(found) != 1:
        return None
    members = {o.result.value.node for o in operations}
    todo = [user for node in given for user in node.users if user not in members]
    read_from = {user: node for node in given for user in node.users}
    while todo:
        user = todo.pop()
        if looks(user):
            todo += user.users
            read_from |= dict.fromkeys(user.users, user)
        elif user not in members and not _ignores_padding(user, read_from[user], found[0]):
            return None
    return found[0]


def multiplications(operations: Sequence[Operation]) -> tuple[int, int]:
    """Return the multiplications for one token in linear layers, and in attention for each token it sees."""
    linear = [o.sizes[1] * o.sizes[2] for o in operations if o.name == "linear"]
    attention = [2 * o.sizes[0] * o.sizes[2] for o in operations if o.name == "attend_all"]
    return sum(linear), sum(attention)


def attention_length(program: ExportedProgram) -> int | None:
    """Return the length in tokens at which attention takes as long as the linear layers of a padding-free program.

    None for a program that computes padding: its chains do, or a tenth of its linear layers is in no chain.
    """
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    chains = [node for node in nodes if str(node.target) == "infer.chain.default"]
    if not chains or any(SIZES not in node.meta for node in chains):
        return None
    linear = sum(node.meta[SIZES][0] for node in chains)
    attention = sum(node.meta[SIZES][1] for node in chains)
    outside = sum(
        _features(node) for node in nodes if re.fullmatch(r"infer\.linear_\w+_packed\..*", str(node.target))
    )
    if linear < LEAST_SHARE * (linear + outside):
        return None
    return max(round(linear / (ATTENTION_COST * attention)), 1)


def _features(node: fx.Node) -> int:
    """Return the number of weights of a packed linear layer."""
    features = next(a for a in node.args if isinstance(a, int))
    return features * int(node.args[0].meta["val"].shape[-1])  # type: ignore[union-attr]


def _inputs_behind(mask: Any, domain: str) -> list[fx.Node]:
    """Return the int64 inputs [batch, tokens] that a mask is computed from."""
    seen: set[fx.Node] = set()
    todo = [mask]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += node.all_input_nodes
    inputs = [
        node for node in seen if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor)
    ]
    return [
        node
        for node in inputs
        if node.meta["val"].dtype == torch.int64 and ",".join(map(str, node.meta["val"].shape)) == domain
    ]


def _ignores_padding(node: fx.Node, rows: fx.Node, real: fx.Node) -> bool:
    """Tell if a node's result is the same whatever finite numbers the rows of padding hold."""
    args = node.args
    if is_call(node, aten.mul.Tensor):
        return _by_row(args[1] if args[0] is rows else args[0], rows, real)
    if is_call(node, aten.select.int):
        return bool(args[0] is rows and tuple(args[1:]) == (1, 0))
    if is_call(node, aten.masked_fill.Scalar):
        where = _origin(args[1])
        if not is_call(where, aten.eq.Scalar) or where.args[1] != 0 or _origin(where.args[0]) is not real:
            return False
        return args[0] is rows and _by_row(args[1], rows, where)
    if is_call(node, aten.gather.default):
        picked = _origin(args[2])
        return bool(args[1] == 1 and is_call(picked, aten.argmax.default) and _origin(picked.args[0]) is real)
    return False


def _by_row(node: Any, rows: fx.Node, real: Any) -> bool:
    """Return true if a tensor is the padding mask `real` in another shape or dtype."""
    if not isinstance(node, fx.Node) or _origin(node) is not real:
        return False
    shape, wanted = node.meta["val"].shape, rows.meta["val"].shape
    return len(shape) == len(wanted) and list(map(str, shape[:-1])) == list(map(str, wanted[:-1]))


def _origin(node: Any) -> Any:
    while is_call(node, *_VIEWS):
        node = node.args[0]
    return node
