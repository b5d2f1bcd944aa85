"""Where a decode step of a language model goes: the big operations, what is between them, and the engine around."""

from __future__ import annotations

import msgspec
import torch

from ..generate import Engine, Request, Sampling
from ..generate.stats import EngineStats
from ..kernels import native


class StepBudget(msgspec.Struct, kw_only=True):
    """Mean seconds of a step, as the first of the threads spends them. The parts of the model's call are 0 where its
    layers do not run as one native call: all of it is `other` then."""

    weights: float  # products with weights
    quantizing: float  # of activations
    attention: float
    rows: float  # norms, activations, sums, positions
    waiting: float  # for the other threads
    other: float  # of the model's call: the graph around the layers
    sampling: float
    engine: float  # planning, inputs, text, bookkeeping

    @property
    def total(self) -> float:
        return sum(msgspec.structs.astuple(self))

    @property
    def outside(self) -> float:
        """The share that is neither weights nor attention; quantizing belongs to the product it is for."""
        return 1 - (self.weights + self.quantizing + self.attention) / self.total


def measure(engine: Engine, batch: int, context: int, tokens: int, *, seed: int = 0) -> StepBudget:
    """Of `tokens` steps of `batch` sequences after random prompts of `context` tokens. The watch itself costs a little:
    a clock is read at every change of work."""
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
    native.watch_chains(on=True)
    for _ in range(tokens):
        engine.step()
    spent, after = native.watch_chains(on=False), engine.stats()
    for i in range(batch):
        engine.cancel(str(i))
    engine.step()  # tells of the cancelled
    return _budget(before, after, spent)


def _budget(before: EngineStats, after: EngineStats, spent: native.ChainTimes) -> StepBudget:
    steps = max(after.steps - before.steps, 1)
    model = after.step_seconds - before.step_seconds
    around = (after.scheduling_seconds - before.scheduling_seconds) + (
        after.output_seconds - before.output_seconds
    )
    return StepBudget(
        weights=spent.multiplying / steps,
        quantizing=spent.quantizing / steps,
        attention=spent.attention / steps,
        rows=spent.rows / steps,
        waiting=spent.waiting / steps,
        other=max(model - sum(spent), 0.0) / steps,
        sampling=(after.sampling_seconds - before.sampling_seconds) / steps,
        engine=around / steps,
    )
