"""Breakdown of a decode step of a language model, timed inside the fused programs that run its layers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from ..kernels import cpu
from ..llm.engine.engine import Engine
from ..llm.engine.requests import Request
from ..llm.engine.sampling_options import Sampling
from ..llm.engine.stats import EngineStats
from ..spec import Finding

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
        """The share that is neither weights nor attention."""
        return 1 - (self.weights + self.quantizing + self.attention) / self.total

    @property
    def shares(self) -> str:
        """`weights 71 %, attention 9 %, …`."""
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
    return _breakdown(batch, spent, calls, took) if any(spent) else None


def of_engine(engine: Engine, batch: int, context: int, tokens: int, *, seed: int = 0) -> StepBreakdown:
    """Watch `tokens` steps of `batch` sequences after random prompts of `context` tokens.

    The watch itself costs a little: a clock is read at every change of work.
    """
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(engine.shape.vocab_size, (batch, context), generator=generator).tolist()
    # The first to be read decode while the others are read.
    sampling = Sampling(max_tokens=engine.context - context, temperature=0, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.submit(Request(id=str(i), prompt=prompt, sampling=sampling))
    begun: set[str] = set()
    while len(begun) < batch and not engine.idle:
        begun |= {output.id for output in engine.step() if output.token_ids}
    before = engine.stats()
    cpu.watch_fused_programs(on=True)
    for _ in range(tokens):
        engine.step()
    spent, after = cpu.watch_fused_programs(on=False), engine.stats()
    for i in range(batch):
        engine.cancel(str(i))
    engine.step()  # tells of the cancelled
    return _with_engine(batch, spent, before, after)


def _with_engine(
    batch: int, spent: cpu.FusedProgramTimes, before: EngineStats, after: EngineStats
) -> StepBreakdown:
    steps = max(after.steps - before.steps, 1)
    around = (after.scheduling_seconds - before.scheduling_seconds) + (
        after.output_seconds - before.output_seconds
    )
    return msgspec.structs.replace(
        _breakdown(batch, spent, steps, after.step_seconds - before.step_seconds),
        sampling=(after.sampling_seconds - before.sampling_seconds) / steps,
        engine=around / steps,
    )


def _breakdown(batch: int, spent: cpu.FusedProgramTimes, steps: int, took: float) -> StepBreakdown:
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
