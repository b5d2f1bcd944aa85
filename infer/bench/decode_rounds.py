"""Rounds of `infer bench`: random prompts through an engine that runs in this thread, so that each step is timed."""

from __future__ import annotations

import time

import msgspec
import torch

from ..errors import UsageError
from ..kernels import cpu
from ..llm.engine.cache.cache_sizing import STATE_SHARE
from ..llm.engine.engine import Engine
from ..llm.engine.requests import Request
from ..llm.engine.sampling.sampling_options import Sampling
from ..llm.engine.scheduling.engine_limits import EngineLimits
from ..llm.engine.stats import EngineStats
from ..llm.llm import LanguageModel
from ..report.measurements import step_breakdown
from ..report.measurements.step_breakdown import StepBreakdown


class DecodeTimes(msgspec.Struct, frozen=True):
    """Seconds until each request had its first token, until the last one had, and of each step that decoded all."""

    first: list[float]
    prefill: float
    steps: list[float]


def tokens_while_reading(batch: int, context: int) -> int:
    """Return how many tokens the first of `batch` prompts may have decoded when the last one is read."""
    return -(-(batch - 1) * context // EngineLimits().mixed_tokens)


def engine_for(model: LanguageModel, batch: int, context: int, tokens: int) -> Engine:
    """Return an engine without prefix cache, whose cache has room for rounds of so many tokens."""
    shape = model.shape
    length = context + tokens_while_reading(batch, context) + tokens
    pages = batch * (-(-length // shape.page) + 1) + 2
    running = batch if shape.state_floats else max(batch, EngineLimits().max_running)
    limits = EngineLimits(prefix_cache=False, max_running=running)
    states = 2 * running * shape.state_bytes
    size = max(pages * shape.layers * shape.page_bytes + states, STATE_SHARE * states)
    return model.new_engine(kv_bytes=size, limits=limits, speculation=False)


def run_round(engine: Engine, batch: int, context: int, tokens: int, *, seed: int) -> DecodeTimes:
    """Answer `batch` random prompts of `context` tokens until all have decoded `tokens` together, and time it."""
    first: dict[str, float] = {}
    steps: list[float] = []
    requests = _random_requests(engine, batch, context, seed)
    start = time.perf_counter()
    for request in requests:
        engine.submit(request)
    while not engine.idle and len(steps) < tokens - 1:  # the first token comes with the prompt
        running, began = len(first), time.perf_counter()
        outputs = engine.step()
        ended = time.perf_counter()
        for output in outputs:
            if output.finish == "error":
                raise UsageError(f"the model failed: {output.stopped_by}")
            if output.token_ids:
                first.setdefault(output.id, ended - start)
        if running == len(outputs) == batch:
            steps.append(ended - began)
    if not steps:
        raise UsageError(
            f"no step decoded all {batch} prompts of {context} tokens together: the first ended before the last was "
            "read",
            hint="Choose a smaller --batch or --context",
        )
    _cancel(engine, batch)
    return DecodeTimes(list(first.values()), max(first.values()), steps)


def watch_steps(engine: Engine, batch: int, context: int, tokens: int) -> StepBreakdown:
    """Break `tokens` steps of `batch` sequences down, after random prompts of `context` tokens.

    The watch itself costs a little: a clock is read at every change of work.
    """
    for request in _random_requests(engine, batch, context, seed=0):
        engine.submit(request)
    begun: set[str] = set()
    while len(begun) < batch and not engine.idle:
        begun |= {output.id for output in engine.step() if output.token_ids}
    before = engine.stats()
    cpu.watch_fused_programs(on=True)
    for _ in range(tokens):
        engine.step()
    spent, after = cpu.watch_fused_programs(on=False), engine.stats()
    _cancel(engine, batch)
    return _with_engine_times(batch, spent, before, after)


def _random_requests(engine: Engine, batch: int, context: int, seed: int) -> list[Request]:
    """Return requests that only the context ends: the first to be read decode while the others are read."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(engine.shape.vocab_size, (batch, context), generator=generator).tolist()
    sampling = Sampling(max_tokens=engine.context - context, temperature=0, ignore_eos=True)
    return [Request(id=str(i), prompt=prompt, sampling=sampling) for i, prompt in enumerate(prompts)]


def _cancel(engine: Engine, batch: int) -> None:
    for i in range(batch):
        engine.cancel(str(i))
    engine.step()  # returns the outputs of the cancelled requests


def _with_engine_times(
    batch: int, spent: cpu.FusedProgramTimes, before: EngineStats, after: EngineStats
) -> StepBreakdown:
    steps = max(after.steps - before.steps, 1)
    around = (after.scheduling_seconds - before.scheduling_seconds) + (
        after.output_seconds - before.output_seconds
    )
    return msgspec.structs.replace(
        step_breakdown.from_times(batch, spent, steps, after.step_seconds - before.step_seconds),
        sampling=(after.sampling_seconds - before.sampling_seconds) / steps,
        engine=around / steps,
    )
