"""`infer::attend_paged` of rotated queries and keys → `infer::attend_paged_rotary`, in a program for an NVIDIA GPU.

There the rotation is done by the launch that writes the cache, where it would take one or, run operator by operator,
twenty of its own.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from ....spec import Finding
from ..graph_pass import Rewriter
from .match import Rotation, rotation_of, tokens_axis

aten = torch.ops.aten
ATTENTION = "infer.attend_paged.default"


class _RotaryFusion(Rewriter):
    def __init__(self, program: ExportedProgram) -> None:
        super().__init__(program)
        self.fused = 0
        self.refused: Counter[str] = Counter()
        self._rows: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}

    def run(self) -> None:
        for node in list(self._graph.nodes):
            if node.op == "call_function" and str(node.target) == ATTENTION:
                found = _rotations(node)
                if isinstance(found, str):
                    self.refused[found] += 1
                elif found is not None:
                    self._replace(node, *found)
        self._erase_rotations()
        self._drop_unused()

    def _replace(self, node: fx.Node, query: Rotation, key: Rotation) -> None:
        cos, sin = self._cosines(query)
        with self._graph.inserting_before(node):
            heads = [
                self._by_token(one.heads, old) for one, old in zip((query, key), node.args, strict=False)
            ]
            made = self._graph.call_function(
                torch.ops.infer.attend_paged_rotary.default,
                (*heads, node.args[2], cos, sin, *query.form, *node.args[3:]),
            )
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        self._graph.erase_node(node)
        self.fused += 1

    def _by_token(self, heads: fx.Node, old: Any) -> fx.Node:
        """Return a view [T, H, D] of heads whose tokens lie on any axis."""
        value, shape = heads.meta["val"], old.meta["val"].shape
        axis, rank = tokens_axis(value), value.dim()
        order = [axis, *(other for other in range(rank) if other != axis)]
        turned = self._call(aten.permute.default, heads, order)
        return self._call(aten.view.default, turned, [-1, int(shape[1]), int(shape[2])])

    def _cosines(self, rotation: Rotation) -> tuple[fx.Node, fx.Node]:
        """Return cosines and sines [T, columns]; those of several layers are made once."""
        if rotation.sin is None:
            return self._complex_parts(rotation.cos)
        return self._row(rotation.cos), self._row(rotation.sin)

    def _row(self, side: fx.Node) -> fx.Node:
        if side not in self._rows:
            with self._graph.inserting_before(side.next):
                row = self._call(aten.reshape.default, side, [-1, int(side.meta["val"].shape[-1])])
            self._rows[side] = (row, row)
        return self._rows[side][0]

    def _complex_parts(self, side: fx.Node) -> tuple[fx.Node, fx.Node]:
        if side not in self._rows:
            with self._graph.inserting_before(side.next):
                parts = self._call(aten.view_as_real.default, side)
                parts = self._call(aten.reshape.default, parts, [-1, int(side.meta["val"].shape[-1]), 2])
                made = [
                    self._call(aten.clone.default, self._call(aten.select.int, parts, 2, i)) for i in (0, 1)
                ]
            self._rows[side] = (made[0], made[1])
        return self._rows[side]

    def _call(self, op: Any, *args: Any) -> fx.Node:
        node = self._graph.call_function(op, args)
        node.meta["val"] = op(*fx.node.map_arg(args, lambda n: n.meta["val"]))
        return node

    def _erase_rotations(self) -> None:
        """Remove operators that nothing reads; a check of the dtype of their result would keep them."""
        for node in reversed(list(self._graph.nodes)):
            checked = node.args[0] if node.target is aten._assert_tensor_metadata.default else node
            unread = node.op == "call_function" and not node.users and not node.is_impure()
            if unread or (checked is not node and len(checked.users) == 1):
                self._graph.erase_node(node)


def _rotations(node: fx.Node) -> tuple[Rotation, Rotation] | str | None:
    """Return the rotations of queries and keys; the reason of a refusal; None where nothing is rotated."""
    query, key = (rotation_of(one) if isinstance(one, fx.Node) else None for one in node.args[:2])
    if query is None and key is None:
        return None
    for one in (query, key):
        if isinstance(one, str):
            return one
    if not isinstance(query, Rotation) or not isinstance(key, Rotation):
        return "only one of queries and keys is rotated"
    if query.form != key.form:
        return "queries and keys are rotated in different forms"
    same = _same(query.cos, key.cos) and (query.sin is key.sin or _same(query.sin, key.sin))
    return (query, key) if same else "queries and keys are rotated by different cosines"


def _same(a: Any, b: Any) -> bool:
    """Tell if two nodes compute the same from the same, by operators that write nothing."""
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return type(a) is type(b) and bool(a == b)
    if a is b:
        return True
    if a.op != "call_function" or a.target is not b.target or a.is_impure() or len(a.args) != len(b.args):
        return False
    leaves = [pytree.tree_leaves((list(one.args), dict(one.kwargs))) for one in (a, b)]
    return len(leaves[0]) == len(leaves[1]) and all(map(_same, *leaves))


def fuse_rotary(program: ExportedProgram) -> tuple[ExportedProgram, list[Finding]]:
    """Return a program whose attention rotates queries and keys, and findings; the input is unchanged."""
    if not any(str(node.target) == ATTENTION for node in program.graph.nodes):
        return program, []
    fusion = _RotaryFusion(program)
    fusion.run()
    if not fusion.fused and not fusion.refused:
        return program, []
    said = "".join(f"; {count} layers not: {reason}" for reason, count in fusion.refused.items())
    why = f"rotary embedding and cache write in one kernel{said}"
    found = [Finding("lower", "rotary attention", fusion.fused, "layers", why)]
    return (fusion.program() if fusion.fused else program), found
