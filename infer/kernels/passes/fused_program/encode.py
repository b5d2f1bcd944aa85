"""Encoding of a fused program as the integers that fused_program.h describes, with its slots allocated."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from .operations import Operation, SlotAllocator, inputs_of
from .values import TEAM, Value, View

CODES = (
    "end",
    "linear",
    "rms_norm",
    "layer_norm",
    "activate",
    "add",
    "multiply",
    "scale",
    "rotate",
    "gather",
    "copy",
    "attend",
    "attend_all",
    "attend_other",
)
RESULT = 2  # the kind of a slot that is the result
MAX_INPUTS = 16  # tensors besides weights


def encode(
    operations: Sequence[Operation], given: Sequence[Value], padding: fx.Node | None = None
) -> tuple[list[fx.Node], list[int], list[float]]:
    """Return operands, program and numbers of `infer::chain`.

    `given`: the values that make the result; `padding`: int64 [batch, tokens], 0 where the result's row is not read.
    """
    return _Encoder(operations, given, padding).encoded()


class _Encoder:
    def __init__(
        self, operations: Sequence[Operation], given: Sequence[Value], padding: fx.Node | None
    ) -> None:
        self._operations, self._given = operations, given
        domains = dict.fromkeys(o.result.value.domain for o in operations)
        gathers = [o for o in operations if o.name == "gather"]
        first = gathers[0].inputs[0].value.domain if gathers else next(iter(domains))
        self._domains = {first: 0} | {name: 1 for name in domains if name != first}
        self._inputs = inputs_of(operations)
        if padding is not None and padding not in self._inputs:
            self._inputs.append(padding)
        self._attended = next((o for o in operations if o.name == "attend"), None)
        self._padding = -1 if padding is None else self._inputs.index(padding)
        self._operands = list(self._inputs)
        self._numbers: list[float] = []
        self._direct = [value for value in given if self._is_direct(value)]
        self._written: dict[Value, list[int]] = {}  # places in the result
        self._slots = SlotAllocator(operations, set(given).difference(self._direct))

    def _is_direct(self, value: Value) -> bool:
        """Return true for a value that a linear layer writes straight into the result, as no operation reads it."""
        return value.direct and all(v.value is not value for o in self._operations for v in o.inputs)

    def encoded(self) -> tuple[list[fx.Node], list[int], list[float]]:
        width = sum(value.width for value in self._given)
        domain = self._domains[self._given[0].domain]
        self._give_slots()
        result, start = len(self._slots.slots), 0
        self._slots.slots.append([RESULT, domain, width])
        copies = []
        for value in self._given:
            to = [result, start, width]
            if value in self._direct:
                self._written[value] = to
            else:
                source = [self._slots.of[value], 0, self._slots.stride(value)]
                copies += [CODES.index("copy"), *source, *to, 1, value.width, value.width]
            start += value.width
        code = [number for operation in self._operations for number in self._operation(operation)]
        code += copies
        inputs = [*self._tokens(), len(self._inputs), *self._attention(), self._padding, self._given[0].lead]
        flat = [number for slot in self._slots.slots for number in slot]
        header = [*inputs, domain, width, len(self._slots.slots)]
        return self._operands, [*header, *flat, *code, 0], self._numbers

    def _give_slots(self) -> None:
        now = 0  # how often the threads have met
        for index, operation in enumerate(self._operations):
            now += operation.name == "gather"
            value = operation.result.value
            if value not in self._direct:
                self._slots.give(value, self._domains[value.domain], now)
            self._slots.end(index, now)
            now += value.kind == TEAM

    def _tokens(self) -> list[int]:
        """Return the operand of the tokens and its width, and the operand of the gathered rows or -1."""
        picked = next((o.read[0] for o in self._operations if o.name == "gather"), None)
        made = {o.result.value for o in self._operations}
        value = next(
            v.value
            for o in self._operations
            for v in o.inputs
            if v.value not in made and self._domains[v.value.domain] == 0
        )
        return [
            self._inputs.index(value.node),
            value.width,
            -1 if picked is None else self._inputs.index(picked),
        ]

    def _attention(self) -> list[int]:
        """Return the indices of slots, block table, starts and lengths; the page and the dtype of the cache."""
        first = self._attended
        if first is None:
            return [-1] * 6
        return [*(self._inputs.index(node) for node in first.read), *first.sizes[-2:]]

    def _place(self, view: View) -> list[int]:
        """Return slot or operand, offset and stride of the rows of a view."""
        value = view.value
        if value in self._slots.of:
            return [self._slots.of[value], view.offset, self._slots.stride(value)]
        return [-1 - self._inputs.index(value.node), view.offset, value.width]

    def _operand(self, node: fx.Node | None) -> int:
        if node is None:
            return -1
        if node not in self._operands:
            self._operands.append(node)
        return self._operands.index(node)

    def _number(self, number: float) -> int:
        if number not in self._numbers:
            self._numbers.append(number)
        return self._numbers.index(number)

    def _operation(self, operation: Operation) -> list[int]:
        places = [self._place(view) for view in operation.inputs]
        value, x = operation.result.value, operation.inputs[0]
        to = self._written.get(value) or [self._slots.of[value], 0, self._slots.stride(value)]
        tensors = [self._operand(node) for node in operation.operands]
        numbers = [self._number(number) for number in operation.numbers]
        heads = [x.heads, _stride(x), x.width]
        code = [CODES.index(operation.name)]
        if operation.name == "linear":
            kind, features, columns = operation.sizes
            return [*code, kind, *places[0], *to, features, columns, *tensors]
        if operation.name == "activate":
            other = places[1] if len(places) > 1 else [-1, 0, -1]
            return [*code, *operation.sizes, *places[0], *other, *to, value.width]
        if operation.name == "attend":
            from_ = [n for p, v in zip(places, operation.inputs, strict=True) for n in (*p, _stride(v))]
            *sizes, layer, window, _, _ = operation.sizes
            fields = [*from_, to[0], *sizes, layer, *tensors, window, *numbers]
            if self._attended is None or operation.read == self._attended.read:
                return [*code, *fields]
            return [CODES.index("attend_other"), *fields, *map(self._inputs.index, operation.read)]
        if operation.name == "attend_all":
            from_ = [n for p, v in zip(places, operation.inputs, strict=True) for n in (*p, _stride(v))]
            *sizes, is_float, batches, rows, causal = operation.sizes
            mask = self._inputs.index(operation.read[0]) if operation.read else -1
            return [*code, *from_, *to, *sizes, mask, is_float, batches, rows, causal, *numbers]
        flat = [number for place in places[:1] for number in place]
        if operation.name in ("add", "multiply"):
            return [*code, *flat, *places[1], *to, value.width]
        if operation.name == "rotate":
            return [*code, *flat, *to, *heads, *operation.sizes, *places[1], *places[2]]
        if operation.name == "rms_norm":
            return [*code, *flat, *to, *heads, *tensors, *numbers]
        if operation.name == "gather":
            return [*code, *flat, *to, value.width, self._inputs.index(operation.read[0])]
        return [*code, *flat, *to, value.width, *tensors, *numbers]


def _stride(view: View) -> int:
    return view.stride or view.width
