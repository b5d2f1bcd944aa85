"""Engine overhead: the time of a step besides the model, and the time that a shared prefix saves."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench.llm import infer_step
from bench.llm.decoder_shapes import SHAPES
from bench.shared.bars import Bar
from bench.shared.repository import MODELS
from infer.llm.engine.engine import Engine
from infer.llm.engine.requests import Request
from infer.llm.engine.sampling.sampling_options import Sampling
from infer.llm.engine.scheduling.scheduler import EngineLimits
from infer.llm.engine.step_runner import StepRunner
from infer.llm.step.step_shape import StepShape

OVERHEAD, PREFIX = "engine overhead, 32 sequences", "shared prefix of 1500 tokens, 32 requests"
SEQUENCES, SHARED, OWN = 32, 1500, 32  # of requests; tokens of their prompts, shared and own
STEPS, WARM = 200, 30
PARTS = ("scheduling", "sampling", "output")
KV_BYTES = 2 << 30
TOKENIZER = MODELS / "pydoc_lm" / "tokenizer.json"
GREEDY = {"temperature": 0.0}
DRAWN = {"temperature": 0.8, "top_k": 40, "top_p": 0.95}


class _InstantStep:
    """Step of the 135M shape that takes no time: its logits are computed in advance."""

    def __init__(self, vocabulary: int, words: int) -> None:
        self.seconds = 0.0
        self._logits = torch.randn(SEQUENCES, vocabulary)
        self._logits[:, words:] -= 100.0  # only tokens that the tokenizer knows are chosen

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        start = time.perf_counter()
        shift = int(inputs["positions"][0]) % 97  # another token at every step
        logits = self._logits[: len(inputs["logit_rows"])].roll(shift, 0)
        self.seconds += time.perf_counter() - start
        return {"logits": logits}


def overhead(seconds: float) -> list[Bar]:
    """Measure decode steps of 32 sequences with text, greedy (the bar) and sampled: ms besides the model."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    found, parts = {}, {}
    for name, sampling in (("greedy", GREEDY), ("drawn", DRAWN)):
        found[name], parts[name] = _overhead(tokenizer, sampling)
    details = {"seconds": found, "mean_seconds": parts}
    unit = "ms beside the model"
    got = found["greedy"] * 1e3
    return [
        Bar(
            work=OVERHEAD,
            rival="-",
            need=1.0,
            got=got,
            below=True,
            unit=unit,
            ours=got / 1e3,
            details=details,
        )
    ]


def _overhead(tokenizer: Tokenizer, sampling: Mapping[str, float]) -> tuple[float, dict[str, float]]:
    """Return the median of a decode step, and the means of its parts."""
    sizes = SHAPES["135M"].sizes
    shape = StepShape(
        layers=1, query_heads=1, kv_heads=1, head_dim=64, vocab_size=sizes["vocab_size"], max_positions=4096
    )
    model = _InstantStep(sizes["vocab_size"], tokenizer.get_vocab_size())
    engine = Engine(model, shape, tokenizer=tokenizer, eos_ids=(), kv_bytes=KV_BYTES // 8)
    for index in range(SEQUENCES):
        chosen = Sampling(max_tokens=STEPS + 2 * WARM, ignore_eos=True, seed=index, **sampling)
        engine.submit(Request(id=str(index), prompt=[5] * 64, sampling=chosen))
    for _ in range(WARM):  # the prompts are read in the first ones
        engine.step()
    took, first = [], engine.stats()
    for _ in range(STEPS):
        start, before = time.perf_counter(), model.seconds
        engine.step()
        took.append(time.perf_counter() - start - (model.seconds - before))
    last = engine.stats()
    parts = {
        part: (getattr(last, f"{part}_seconds") - getattr(first, f"{part}_seconds")) / STEPS for part in PARTS
    }
    return statistics.median(took), parts


def prefix(seconds: float) -> list[Bar]:
    """Measure the time to read 32 prompts, submitted at once, with and without the prefix cache."""
    folder = infer_step.prepare(SHAPES["135M"], "8 bit head", torch.get_num_threads())
    step = infer_step.InferStep(folder, length=32)
    tokens = SHAPES["135M"].tokens.tolist()
    took, first = {}, {}
    for cached in (True, False):
        took[cached], first[cached] = _read(step.runner, step.shape, tokens, cached=cached)
    step.close()
    bar = Bar(work=PREFIX, rival="own engine without prefix cache", need=5.0, unit="× less prefill time")
    if first[True] != first[False]:
        bar.why = "the first tokens differ with the prefix cache: nothing is counted"
        return [bar]
    bar.ours, bar.theirs, bar.got = took[True], took[False], took[False] / took[True]
    return [bar]


def _read(
    step: StepRunner, shape: StepShape, tokens: Sequence[int], *, cached: bool
) -> tuple[float, dict[str, tuple[int, ...]]]:
    """Return the seconds, and the first token of each request."""
    limits = EngineLimits(prefix_cache=cached)
    engine = Engine(step, shape, tokenizer=None, eos_ids=(), kv_bytes=KV_BYTES, limits=limits)
    for index in range(SEQUENCES):
        own = [(7 * index + place) % 1000 + 3 for place in range(OWN)]
        chosen = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
        engine.submit(Request(id=str(index), prompt=[*tokens[:SHARED], *own], sampling=chosen))
    start, found = time.perf_counter(), {}
    while not engine.idle:
        found |= {output.id: output.token_ids for output in engine.step() if output.token_ids}
    return time.perf_counter() - start, found
