"""Partition of a captured program into fused programs, each one call of `infer::chain`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from ...ops import fused_program  # noqa: F401 - the operator that is put in
from ..graph_pass import Rewriter
from .encode import MAX_INPUTS, encode
from .graph_reader import GraphReader
from .lower import lower_node
from .match import matched
from .operations import Operation, inputs_of
from .padding import SIZES, multiplications, padding_of
from .picked_rows import with_rows_picked_first
from .values import BATCH, COLUMNS, HEADS, ONE, TOKENS, Value, View

aten, own = torch.ops.aten, torch.ops.infer
MIN_OPERATIONS = 3  # operations that are worth a chain
# Operators that read memory in the order of the original graph, which the results of chains need not have.
LAYOUT = (
    "aten.as_strided.default",
    "aten.view.dtype",
    "aten.view_as_complex.default",
    "aten.view_as_real.default",
)
IN_PLACE = re.compile(r"aten\.[a-z]\w*_\.\w+")  # writes its operand, which chains would not see
CACHE = 3  # the place of the cache among the arguments of attention


def fuse_layers(program: ExportedProgram) -> ExportedProgram:
    """Replace the layers of a packed program by fused programs; operators that can't be fused stay."""
    calls = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    if not any("linear_" in call and "_packed." in call for call in calls):
        return program
    if any(call in LAYOUT or IN_PLACE.fullmatch(call) for call in calls):
        return program
    flat = any("attend_native" in call for call in calls)
    program = matched(program)
    builder = _Builder(with_rows_picked_first(program) if flat else program)
    builder.run(flat=flat)
    return builder.program()


def _gathers_next(operations: Sequence[Operation], gather: Operation) -> bool:
    """Tell if a program can go on with `gather`: it is its first one, or follows others of the same rows."""
    before = [i for i, o in enumerate(operations) if o.name == "gather"]
    return not before or all(o.name == "gather" and o.read == gather.read for o in operations[before[0] :])


@dataclass
class _Group:
    """Operations of one fused program."""

    operations: list[Operation] = field(default_factory=list)
    values: set[Value] = field(default_factory=set)
    tainted: set[fx.Node] = field(default_factory=set)  # computed outside from what the chain gives


class _Builder(Rewriter):
    def run(self, *, flat: bool) -> None:
        """Fuse all layers. `flat`: a language model's step, whose programs may write a paged cache and pick rows."""
        self._flat, self._reader = flat, GraphReader(flat=flat)
        self._known = self._reader.views.known
        self._absorbed: dict[fx.Node, Operation] = {}
        self._groups: list[_Group] = []
        self._begin()
        for node in self._graph.nodes:
            if node.op != "call_function" or self._reader.views.follow(node):
                continue
            operation = lower_node(self._reader, node)
            tainted = self._groups[-1].tainted
            if operation is not None:
                self._append(node, operation)
            elif any(n in tainted or self._reader.in_program(n) for n in node.all_input_nodes):
                tainted.add(node)
        for group in self._groups:
            self._emit(group)
        self._sort()
        self._graph.eliminate_dead_code()
        self._drop_unused()

    # Which chain

    def _begin(self) -> _Group:
        group = _Group()
        self._groups.append(group)
        self._reader.values = group.values
        return group

    def _append(self, node: fx.Node, operation: Operation) -> None:
        group = self._groups[-1]
        needed = [v.value.node for v in operation.inputs] + [o for o in operation.operands if o is not None]
        needed += operation.read
        domains = {o.result.value.domain for o in group.operations} | {operation.result.value.domain}
        again = operation.name == "gather" and not _gathers_next(group.operations, operation)
        inputs = len(inputs_of([*group.operations, operation]))
        if (
            group.tainted.intersection(needed)
            or len(domains) > (2 if self._flat else 1)
            or again
            or inputs > MAX_INPUTS
        ):
            group = self._begin()
            if not all(self._plain(view.value) for view in operation.inputs):
                return
        group.operations.append(operation)
        group.values.add(operation.result.value)
        self._known[node] = operation.result
        self._absorbed[node] = operation

    def _plain(self, value: Value) -> bool:
        """Return true if a value's tensor in the graph is its rows, so that another fused program can read it."""
        view = self._known.get(value.node)
        return view is None or view.in_order()

    # What becomes of them

    def _emit(self, group: _Group) -> None:
        operations = group.operations
        if len(operations) < MIN_OPERATIONS or not any(o.name == "linear" for o in operations):
            return
        given = self._given(operations)
        if len({value.domain for value in given}) > 1:
            middle = next((i for i, o in enumerate(operations) if o.name == "gather"), None)
            if middle is not None:
                self._emit(_Group(operations[:middle]))
                self._emit(_Group(operations[middle:]))
            return  # without a gather between them, rows of two kinds are not fused
        padding = None if self._flat else padding_of(operations, [v.node for v in given], self._looks)
        operands, program, numbers = encode(operations, given, padding)
        last = operations[-1].result.value.node
        with self._graph.inserting_after(last):
            call = self._call(operations, operands, program, numbers)
        shape = fused_program.result_shape([n.meta["val"] for n in operands], program)
        call.meta["val"] = last.meta["val"].new_empty(shape)
        if padding is not None:
            call.meta[SIZES] = multiplications(operations)
        start, members = 0, [operation.result.value.node for operation in operations]
        for value in given:
            rows = self._columns(call, start, value.width)
            shown = self._shown(rows, self._known[value.node])
            value.node.replace_all_uses_with(shown)
            value.node = rows
            start += value.width
        for node in reversed(members):
            self._erase(node)

    def _looks(self, node: fx.Node) -> bool:
        """Return true if a node is a view of the rows of a value."""
        return node in self._known and node not in self._absorbed

    def _call(
        self,
        operations: Sequence[Operation],
        operands: list[fx.Node],
        program: list[int],
        numbers: list[float],
    ) -> fx.Node:
        attention = next((o.result.value.node for o in operations if o.name == "attend"), None)
        if attention is None:
            return self._graph.call_function(own.chain.default, (operands, program, numbers))
        return self._graph.call_function(
            own.chain_attend.default, (attention.args[CACHE], operands, program, numbers)
        )

    def _erase(self, node: fx.Node) -> None:
        """Erase a view of an erased value, with all views of it."""
        while node.users:
            self._erase(next(iter(node.users)))
        self._graph.erase_node(node)

    def _given(self, operations: Sequence[Operation]) -> list[Value]:
        """Return the values that something outside reads."""
        members = {o.result.value.node for o in operations}
        given = []
        for operation in operations:
            seen: set[fx.Node] = set()
            todo = list(operation.result.value.node.users)
            while todo:
                user = todo.pop()
                if user in members or user in seen:
                    continue
                seen.add(user)
                if user not in self._known and user not in self._reader.views.parts:
                    given.append(operation.result.value)
                    break
                if user in self._absorbed:  # of another chain
                    given.append(operation.result.value)
                    break
                todo += list(user.users)
        return given

    def _columns(self, call: fx.Node, start: int, width: int) -> fx.Node:
        """Slice one of the results of a fused program by its columns."""
        whole = call.meta["val"]
        if width == whole.shape[-1]:
            return call
        return self._after(call, aten.slice.Tensor, (call, whole.dim() - 1, start, start + width))

    def _shown(self, rows: fx.Node, view: View) -> fx.Node:
        """Reshape rows of a fused program's result to the tensor that they replace."""
        shape = [i for i, axis in enumerate(view.axes) if axis == ONE]
        order = [*[BATCH] * view.axes.count(BATCH), TOKENS, *[HEADS] * view.axes.count(HEADS), COLUMNS]
        wanted = [axis for axis in view.axes if axis != ONE]
        last = rows
        if HEADS in view.axes:
            last = self._after(last, aten.unflatten.int, (last, -1, [view.heads, view.width]))
        if wanted != order:
            last = self._after(last, aten.permute.default, (last, [order.index(axis) for axis in wanted]))
        for axis in shape:
            last = self._after(last, aten.unsqueeze.default, (last, axis))
        return last

    def _after(self, place: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
        with self._graph.inserting_after(place):
            node = self._graph.call_function(target, args)
        node.meta["val"] = target(*fx.node.map_arg(args, lambda n: n.meta["val"]))
        return node

    def _sort(self) -> None:
        """Sort nodes after their operands, otherwise keeping their order."""
        order = {node: i for i, node in enumerate(self._graph.nodes)}
        done: set[fx.Node] = set()
        output = next(node for node in self._graph.nodes if node.op == "output")
        for node in list(order):
            stack = [node]
            while stack:
                top = stack[-1]
                waiting = [n for n in top.all_input_nodes if n not in done]
                if top in done or not waiting:
                    stack.pop()
                    if top not in done and top is not output:
                        output.prepend(top)
                    done.add(top)
                else:
                    stack += waiting
