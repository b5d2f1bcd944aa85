"""Client runs on a shared machine, repeated when other processes disturbed them.

Programs that are not ours, or the hypervisor, may take more than a tenth of a core: then the run is made again, at most
`AGAIN` times, `MOST_AGAIN` in all, whatever came of it. What this can't see is a machine that is slower for a second or
two for reasons of its own (a neighbour's use of the memory); short runs in turns, and many of them, are for that.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from bench.shared.processor_time import OtherProcesses
from bench.shared.results import progress

AGAIN, MOST_AGAIN = 2, 15
MOST_TAKEN = 0.1  # of a core, by others


class Driver(Protocol):
    def __call__(self, phases: list[list[float]], *, seed: int, **how: Any) -> np.ndarray: ...


class UndisturbedRuns:
    """Runs of `fire` that other processes left undisturbed, as far as that can be had."""

    def __init__(self, fire: Driver) -> None:
        self._fire, self._others = fire, OtherProcesses()
        self.runs = self.again = self.unfair = 0

    def fire(self, phases: list[list[float]], **how: Any) -> np.ndarray:
        """Return rows as `open_loop_client` describes them; phases of seconds and requests a second."""
        self.runs += 1
        for attempt in range(AGAIN + 1):
            self._others.begin()
            rows = self._fire(phases, **how)
            taken = self._others.cores()
            if taken <= MOST_TAKEN or attempt == AGAIN or self.again == MOST_AGAIN:
                break
            self.again += 1
            progress(f"again: others took {taken:.2f} cores")
        self.unfair += taken > MOST_TAKEN
        return rows

    @property
    def note(self) -> str:
        return f"{self.runs} runs, {self.again} made again, {self.unfair} of them left disturbed"
