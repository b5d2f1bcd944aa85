"""Decoder layers → chains: which nodes of a captured step one call of `infer::chain` computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from . import chain_ops  # noqa: F401 - the operator that is put in
from .chain_encode import MOST_INPUTS, Operation, encode, inputs_of
from .chain_match import is_call, matched
from .chain_values import COLUMNS, HEADS, ONE, ROW, TEAM, TOKENS, Value, View, Views, outside
from .rewriting import Rewriter

aten, own = torch.ops.aten, torch.ops.infer
_LINEAR = {"linear_lut4_packed": 0, "linear_int8_packed": 1, "linear_int8_weight_packed": 2}
_ACTIVATIONS = {
    aten.silu.default: 0,
    aten.relu.default: 3,
    aten.sigmoid.default: 4,
    aten.tanh.default: 5,
}
_ATTENTION = "attend"
FEWEST = 3  # operations that are worth a chain
CACHE = 3  # the place of the cache among the arguments of attention


def fused(program: ExportedProgram) -> ExportedProgram:
    """The packed step of a language model on chains; other programs, and what does not fit, as they are."""
    calls = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    if not any(_ATTENTION in call for call in calls) or not any("_packed." in call for call in calls):
        return program
    builder = _Builder(matched(program))
    builder.run()
    return builder.program()


@dataclass
class _Chain:
    operations: list[Operation] = field(default_factory=list)
    values: set[Value] = field(default_factory=set)
    tainted: set[fx.Node] = field(default_factory=set)  # computed outside from what the chain gives


class _Builder(Rewriter):
    def run(self) -> None:
        self._views = Views()
        self._outside: dict[fx.Node, View] = {}
        self._absorbed: dict[fx.Node, Operation] = {}
        self._chains = [_Chain()]
        for node in self._graph.nodes:
            if node.op != "call_function" or self._views.follow(node):
                continue
            operation = self._operation(node)
            if operation is None:
                if any(n in self._chains[-1].tainted or self._in_chain(n) for n in node.all_input_nodes):
                    self._chains[-1].tainted.add(node)
                continue
            self._append(node, operation)
        for chain in self._chains:
            self._emit(chain)
        self._sort()
        self._graph.eliminate_dead_code()
        self._drop_unused()

    # Which nodes

    def _operation(self, node: Any) -> Operation | None:
        """What of a chain `node` is, or None."""
        tensor = node.meta.get("val")
        if (
            not isinstance(tensor, torch.Tensor)
            or tensor.dtype != torch.float32
            or tensor.device.type != "cpu"
        ):
            return None
        name = getattr(getattr(node.target, "_schema", None), "name", "").rpartition("::")[2]
        if name in _LINEAR:
            return self._linear(node, _LINEAR[name])
        rule = _RULES.get(node.target)
        return rule(self, node) if rule is not None else None

    def _view(self, node: Any) -> View | None:
        if not isinstance(node, fx.Node):
            return None
        if node in self._views.known:
            return self._views.known[node]
        if node not in self._outside:
            view = outside(node)
            if view is None:
                return None
            same = self._outside.get(view.value.node)
            self._outside[node] = self._outside[view.value.node] = same or view
        return self._outside[node]

    def _rows(self, node: Any) -> View | None:
        view = self._view(node)
        return view if view is not None and view.is_rows() else None

    def _vector(self, node: Any, width: int) -> bool:
        """Whether it is a float32 weight of so many numbers, or None."""
        if node is None:
            return True
        if not isinstance(node, fx.Node) or node.op != "placeholder":
            return False
        value = node.meta["val"]
        return value.dtype == torch.float32 and tuple(value.shape) == (width,)

    def _made(self, node: fx.Node, like: View, kind: int = ROW, width: int = 0) -> View:
        """The dense result of an operation, its axes as those of `like`."""
        value = Value(node, like.value.domain, width or like.columns, kind)
        if width or like.heads == 1:
            return View(value, like.axes, width or like.width)
        return View(value, like.axes, like.width, 0, like.heads, like.width)

    def _linear(self, node: Any, kind: int) -> Operation | None:
        x = self._rows(node.args[0])
        sizes = [a for a in node.args if isinstance(a, int)]
        if x is None:
            return None
        operands = [a for a in node.args[1:] if not isinstance(a, int)]
        bias = operands.pop()
        weights = [*operands, *[None] * (4 - len(operands))]
        made = self._made(node, x, TEAM, sizes[0])
        made.value.direct = True
        return Operation("linear", [x], made, [kind, sizes[0], x.width], [*weights, bias])

    def _rms_norm(self, node: Any) -> Operation | None:
        source, weight, offset, eps = node.args
        x = self._view(source)
        if x is None or x.axes[-1] != COLUMNS or not self._vector(weight, x.width):
            return None
        return Operation("rms_norm", [x], self._made(node, x), [], [weight], [offset, eps])

    def _layer_norm(self, node: Any) -> Operation | None:
        source, shape, weight, bias, eps = (
            (*node.args, None, None, 1e-5)[:5] if len(node.args) < 5 else node.args[:5]
        )
        x = self._rows(source)
        if (
            x is None
            or shape != [x.width]
            or not self._vector(weight, x.width)
            or not self._vector(bias, x.width)
        ):
            return None
        return Operation("layer_norm", [x], self._made(node, x), [], [weight, bias], [eps])

    def _activation(self, node: Any) -> Operation | None:
        x = self._rows(node.args[0])
        if x is None:
            return None
        kind = _ACTIVATIONS.get(node.target)
        if kind is None:
            kind = 1 if node.kwargs.get("approximate") == "tanh" else 2
        return Operation("activate", [x], self._made(node, x), [kind])

    def _binary(self, node: Any) -> Operation | None:
        if node.kwargs or len(node.args) != 2:
            return None
        a, b = node.args
        if isinstance(a, (int, float)):
            a, b = b, a
        if isinstance(b, (int, float)):
            x = self._rows(a) if is_call(node, aten.mul.Tensor) else None
            return None if x is None else Operation("scale", [x], self._made(node, x), [], [], [float(b)])
        x, y = self._rows(a), self._rows(b)
        if x is None or y is None or (x.value.domain, x.width) != (y.value.domain, y.width):
            return None
        if len(x.axes) < len(y.axes):
            x, y = y, x
        if not (self._in_chain(x.value.node) or self._in_chain(y.value.node)):
            return None  # a chain starts with a norm or a linear layer
        return Operation("add" if is_call(node, aten.add.Tensor) else "multiply", [x, y], self._made(node, x))

    def _rotate(self, node: Any) -> Operation | None:
        x, cos, sin = self._view(node.args[0]), self._rows(node.args[1]), self._rows(node.args[2])
        if x is None or cos is None or sin is None or x.axes[-1] != COLUMNS or HEADS not in x.axes:
            return None
        if len({x.value.domain, cos.value.domain, sin.value.domain}) > 1 or cos.width % 2:
            return None
        # Positions are given for every head: their axis of heads has one.
        return Operation("rotate", [x, cos, sin], self._made(node, x), [cos.width])

    def _pick(self, node: Any) -> Operation | None:
        source, index = node.args
        x = self._rows(source)
        if x is None or not isinstance(index, (list, tuple)) or len(index) != len(x.axes) - 1:
            return None
        *before, rows = index
        if (
            any(i is not None for i in before)
            or not isinstance(rows, fx.Node)
            or not self._in_chain(x.value.node)
        ):
            return None
        value = rows.meta["val"]
        if value.dtype != torch.int64 or value.dim() != 1:
            return None
        made = Value(node, str(value.shape[0]), x.width)
        return Operation("gather", [x], View(made, x.axes, x.width), read=[rows])

    def _attend(self, node: Any) -> Operation | None:
        query, key, value = views = [self._view(n) for n in node.args[:3]]
        read = list(node.args[4:8])
        sinks, layer, page, dtype, scale, window, softcap = node.args[8:]
        if query is None or key is None or value is None or not self._in_chain(query.value.node):
            return None
        if any(view is None or view.axes != (TOKENS, HEADS, COLUMNS) for view in views):
            return None
        sizes = [query.heads, key.heads, query.width, layer, window, page, dtype]
        result = self._made(node, replace(query, stride=query.width), TEAM)
        return Operation("attend", [query, key, value], result, sizes, [sinks], [scale, softcap], read)

    # Which chain

    def _in_chain(self, node: fx.Node) -> bool:
        view = self._views.known.get(node)
        return view is not None and view.value in self._chains[-1].values

    def _append(self, node: fx.Node, operation: Operation) -> None:
        chain = self._chains[-1]
        needed = [v.value.node for v in operation.inputs] + [o for o in operation.operands if o is not None]
        needed += operation.read
        domains = {o.result.value.domain for o in chain.operations} | {operation.result.value.domain}
        again = operation.name == "gather" and any(o.name == "gather" for o in chain.operations)
        inputs = len(inputs_of([*chain.operations, operation]))
        if chain.tainted.intersection(needed) or len(domains) > 2 or again or inputs > MOST_INPUTS:
            chain = _Chain()
            self._chains.append(chain)
            if not all(self._plain(view.value) for view in operation.inputs):
                return
        chain.operations.append(operation)
        chain.values.add(operation.result.value)
        self._views.known[node] = operation.result
        self._absorbed[node] = operation

    def _plain(self, value: Value) -> bool:
        """Whether its tensor in the graph is the rows themselves, so that another chain can read it."""
        view = self._views.known.get(value.node)
        return view is None or view.axes.index(TOKENS) == view.axes.count(ONE)

    # What becomes of them

    def _emit(self, chain: _Chain) -> None:
        operations = chain.operations
        if len(operations) < FEWEST or not any(o.name == "linear" for o in operations):
            return
        given = self._given(operations)
        if len({value.domain for value in given}) > 1:
            middle = next(i for i, o in enumerate(operations) if o.name == "gather")
            self._emit(_Chain(operations[:middle]))
            self._emit(_Chain(operations[middle:]))
            return
        operands, program, numbers = encode(operations, given)
        last = operations[-1].result.value.node
        with self._graph.inserting_after(last):
            call = self._call(operations, operands, program, numbers)
        shape = chain_ops.result_shape([n.meta["val"] for n in operands], program)
        call.meta["val"] = last.meta["val"].new_empty(shape)
        start, members = 0, [operation.result.value.node for operation in operations]
        for value in given:
            cut, shown = self._shown(call, self._views.known[value.node], start)
            value.node.replace_all_uses_with(shown)
            value.node = cut
            start += value.width
        for node in reversed(members):
            self._erase(node)

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
        """A node that only looked at what is gone, with all that looks at it."""
        while node.users:
            self._erase(next(iter(node.users)))
        self._graph.erase_node(node)

    def _given(self, operations: Sequence[Operation]) -> list[Value]:
        """The values that something outside reads."""
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
                if user not in self._views.known and user not in self._views.parts:
                    given.append(operation.result.value)
                    break
                if user in self._absorbed:  # of another chain
                    given.append(operation.result.value)
                    break
                todo += list(user.users)
        return given

    def _shown(self, call: fx.Node, view: View, start: int) -> tuple[fx.Node, fx.Node]:
        """Columns of the result of a chain: as rows, and as the tensor they replace."""
        value = view.value
        shape = [i for i, axis in enumerate(view.axes) if axis == ONE]
        order = [TOKENS, HEADS, COLUMNS] if HEADS in view.axes else [TOKENS, COLUMNS]
        wanted = [axis for axis in view.axes if axis != ONE]
        cut = last = self._after(call, aten.slice.Tensor, (call, 1, start, start + value.width))
        if HEADS in view.axes:
            last = self._after(last, aten.unflatten.int, (last, 1, [view.heads, view.width]))
        if wanted != order:
            last = self._after(last, aten.permute.default, (last, [order.index(axis) for axis in wanted]))
        for axis in shape:
            last = self._after(last, aten.unsqueeze.default, (last, axis))
        return cut, last

    def _after(self, place: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
        with self._graph.inserting_after(place):
            node = self._graph.call_function(target, args)
        node.meta["val"] = target(*(a.meta["val"] if isinstance(a, fx.Node) else a for a in args))
        return node

    def _sort(self) -> None:
        """Nodes after their operands, otherwise in the order they have."""
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


_RULES: dict[Any, Any] = {
    own.rms_norm.default: _Builder._rms_norm,
    aten.layer_norm.default: _Builder._layer_norm,
    aten.gelu.default: _Builder._activation,
    **dict.fromkeys(_ACTIVATIONS, _Builder._activation),
    aten.add.Tensor: _Builder._binary,
    aten.mul.Tensor: _Builder._binary,
    own.rotate.default: _Builder._rotate,
    aten.index.Tensor: _Builder._pick,
    own.attend_native.default: _Builder._attend,
}
