"""Rivals of a comparison in processes of their own: one that crashes is a row, and the others are timed in turns.

A whole turn runs in the rival's process, so that no pipe is between two of its calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from bench.shared import timing
from bench.shared.child_process import ChildProcess, EngineCrashed
from bench.shared.timing import ROUNDS, Side


class Rivals:
    """Processes of the rivals of one piece of work. `crashed` says how those ended that are not timed any more."""

    def __init__(self) -> None:
        self._processes: dict[str, tuple[ChildProcess, list[Side]]] = {}
        self.crashed: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child, _ in self._processes.values():
            child.close()

    def start(self, name: str, make: Callable[..., list[Side]], *arguments: Any) -> None:
        """Start the compared implementations in a subprocess, with torch's current number of threads.

        `make` is a function of a module; its arguments are plain values and numpy arrays, since they are pickled.
        Raises `RuntimeError` with the text of an exception that `make` raises.
        """
        try:
            child = ChildProcess(_Sides, make, arguments, torch.get_num_threads())
        except EngineCrashed as error:
            self.crashed[name] = str(error)
            return
        self._processes[name] = child, []
        try:
            found = child.call("names")
        except EngineCrashed:
            self._drop_ended()
            return
        self._processes[name] = child, [_side(child, i, *one) for i, one in enumerate(found)]

    def sides(self, name: str) -> list[Side]:
        """Return the sides of one rival; none once it has crashed."""
        return self._processes[name][1] if name in self._processes else []

    def outputs(self) -> dict[str, Tensor]:
        """Return what each side computes, float32, by the name of the side."""
        found: dict[str, Tensor] = {}
        for name in list(self._processes):
            try:
                found |= {side.name: side.output() for side in self.sides(name)}
            except EngineCrashed:
                self._drop_ended()
        return found

    def turns(self, others: Sequence[Side], rounds: int = ROUNDS) -> dict[str, list[float]]:
        """Time all sides and `others` as `timing.turns` does, again without a rival that crashes meanwhile."""
        while True:
            sides = [side for _, sides in self._processes.values() for side in sides]
            try:
                return timing.turns([*others, *sides], rounds)
            except EngineCrashed:
                self._drop_ended()

    def interleaved(self, others: Sequence[Side], rounds: int = ROUNDS) -> dict[str, float]:
        """Return the median seconds of one product of each side and of `others`."""
        return timing.medians(self.turns(others, rounds))

    def _drop_ended(self) -> None:
        for name, (child, _) in list(self._processes.items()):
            try:
                child.call("names")
            except EngineCrashed as error:
                self.crashed[name] = str(error)
                self._processes.pop(name)[0].close()


def _side(child: ChildProcess, index: int, name: str, copies: int) -> Side:
    def output() -> Tensor:
        return torch.from_numpy(child.call("output", index))

    run, turn = functools.partial(child.timed, "run", index), functools.partial(child.call, "turn", index)
    return Side(name, run, output, copies, child.pid, turn)


class _Sides:
    """Sides in the process of a rival."""

    def __init__(self, make: Callable[..., list[Side]], arguments: tuple[Any, ...], threads: int) -> None:
        torch.set_num_threads(threads)
        self._sides = make(*arguments)

    def names(self) -> list[tuple[str, int]]:
        return [(side.name, side.copies) for side in self._sides]

    def run(self, index: int) -> None:
        self._sides[index].run()

    def turn(self, index: int) -> float:
        return timing.turn(self._sides[index])

    def output(self, index: int) -> np.ndarray:
        return self._sides[index].output().detach().float().numpy()
