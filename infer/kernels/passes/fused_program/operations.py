"""Operations of a fused program, and the memory slots that their results take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from .values import ROW, TEAM, Value, View


@dataclass
class Operation:
    """Operation of a fused program.

    `operands` are weights or None, `numbers` constants, in the order of fused_program.h; `read` are other tensors: the
    rows to pick, or slots, block table, starts and lengths, then the cache.
    """

    name: str
    inputs: list[View]
    result: View
    sizes: list[int] = field(default_factory=list)
    operands: list[fx.Node | None] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    read: list[fx.Node] = field(default_factory=list)


def inputs_of(operations: Sequence[Operation]) -> list[fx.Node]:
    """Return the tensors read besides weights."""
    made = {o.result.value for o in operations}
    nodes = [v.value.node for o in operations for v in o.inputs if v.value not in made]
    nodes += [node for o in operations for node in o.read if node is not None]
    return list(dict.fromkeys(nodes))


class SlotAllocator:
    """Allocation of memory slots to values; a slot that all threads write must have no readers left."""

    def __init__(self, operations: Sequence[Operation], kept: set[Value]) -> None:
        self.slots: list[list[int]] = []  # kind, domain, width
        self.of: dict[Value, int] = {}
        self._free: list[tuple[int, int, int, int]] = []  # kind, domain, slot, round it was last read in
        last = {}
        for i, operation in enumerate(operations):
            for value in (operation.result.value, *(v.value for v in operation.inputs)):
                last[value] = i
        for value in kept:
            last[value] = len(operations)
        self._ends: dict[int, list[Value]] = {}
        for value, i in last.items():
            self._ends.setdefault(i, []).append(value)

    def give(self, value: Value, domain: int, now: int) -> None:
        fits = [
            entry
            for entry in self._free
            if entry[:2] == (value.kind, domain) and (value.kind == ROW or entry[3] < now)
        ]
        if fits:
            best = min(fits, key=lambda entry: abs(self.slots[entry[2]][2] - value.width))
            self._free.remove(best)
            slot = best[2]
            self.slots[slot][2] = max(self.slots[slot][2], value.width)
        else:
            slot = len(self.slots)
            self.slots.append([value.kind, domain, value.width])
        self.of[value] = slot

    def stride(self, value: Value) -> int:
        """Return the floats between rows.

        Rows that threads write separately keep each to its own part of a slot; what all threads write together is
        dense.
        """
        return value.width if value.kind == TEAM else self.slots[self.of[value]][2]

    def end(self, index: int, now: int) -> None:
        """Free what is read for the last time by operation `index`."""
        for value in self._ends.get(index, []):
            if value in self.of:
                slot = self.of[value]
                self._free.append((self.slots[slot][0], self.slots[slot][1], slot, now))
