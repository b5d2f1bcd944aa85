"""Breakdown of a decode step of a language model, timed inside the fused programs that run its layers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from ...kernels import cpu
from ...spec import Finding

STAGE = "decode step"
CALLS, SECONDS = 30, 1.0  # of watching, whichever is over first


class StepBreakdown(msgspec.Struct, frozen=True, kw_only=True):
    """Mean seconds of a step of `batch` sequences, as the first of the threads spends them.

    The parts of the model's call are 0 where its layers do not run as one native call: all of it is `other` then.
    `sampling` and `engine` are 0 where the step was called without an engine.
    """

    batch: int
    weights: float = 0.0  # products with weights
    quantizing: float = 0.0  # of activations
    attention: float = 0.0
    rows: float = 0.0  # norms, activations, sums, positions
    waiting: float = 0.0  # for the other threads
    other: float = 0.0  # of the model's call: the graph around the layers
    sampling: float = 0.0
    engine: float = 0.0  # planning, inputs, text, bookkeeping

    @property
    def parts(self) -> dict[str, float]:
        """Name → seconds of every part that takes any; quantizing belongs to the product it is for."""
        each = {
            "weights": self.weights + self.quantizing,
            **{
                name: getattr(self, name)
                for name in ("attention", "rows", "waiting", "other", "sampling", "engine")
            },
        }
        return {name: seconds for name, seconds in each.items() if seconds}

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def outside(self) -> float:
        """Share of the step's time that is neither weights nor attention."""
        return 1 - (self.weights + self.quantizing + self.attention) / self.total

    @property
    def shares(self) -> str:
        """Shares of the step's time as text: `weights 71 %, attention 9 %, …`."""
        return ", ".join(f"{name} {100 * s / self.total:.0f} %" for name, s in self.parts.items())

    def finding(self) -> Finding:
        return Finding(STAGE, f"batch {self.batch}", self.total, "s", self.shares)


def of_call(call: Callable[[], Any], batch: int) -> StepBreakdown | None:
    """Watch `call`, a step of `batch` sequences without an engine; None where it has no native chain."""
    call()
    cpu.watch_fused_programs(on=True)
    began, calls = time.perf_counter(), 0
    while calls < CALLS and time.perf_counter() - began < SECONDS:
        call()
        calls += 1
    took = time.perf_counter() - began
    spent = cpu.watch_fused_programs(on=False)
    return from_times(batch, spent, calls, took) if any(spent) else None


def from_times(batch: int, spent: cpu.FusedProgramTimes, steps: int, took: float) -> StepBreakdown:
    """Split the seconds `took` of the model's calls into their parts."""
    return StepBreakdown(
        batch=batch,
        weights=spent.multiplying / steps,
        quantizing=spent.quantizing / steps,
        attention=spent.attention / steps,
        rows=spent.rows / steps,
        waiting=spent.waiting / steps,
        other=max(took - sum(spent), 0.0) / steps,
    )
