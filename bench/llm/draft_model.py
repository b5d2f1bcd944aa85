"""Decoding of a 1B shape with drafts of a 135M shape: tokens a second with and without, by how many are accepted.

Random weights don't agree, so acceptance is forced: the draft model computes its steps as ever, and what it draws is
the token that the large model chose without drafts, or, with the given chance, another one. Everything else is the
engine's own: it verifies, rejects, times, and decides how long drafts are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.llm import infer_step
from bench.llm.decoder_shapes import SHAPES
from bench.shared import timing
from bench.shared.bars import Bar
from bench.shared.suite import THREADS
from bench.shared.timing import Side
from infer.llm.engine.draft_model import DraftModel
from infer.llm.engine.engine import Engine
from infer.llm.engine.requests import Request
from infer.llm.engine.sampling.sampler import Sampler
from infer.llm.engine.sampling.sampling_options import Sampling
from infer.llm.engine.scheduling.engine_limits import EngineLimits
from infer.llm.engine.sequence import Sequence as Completion

NAME = "draft model, 1B with 135M"
HEAD = "8 bit head"
ACCEPTED = (0.0, 0.3, 0.5, 0.7, 0.9)
FASTER = {0.0: 0.98, 0.7: 1.6}  # bars: tokens a second against none
PROMPT, TOKENS, KV_BYTES = 128, 96, 1 << 29


class _Within:
    """Step of a model that chooses among the tokens of the draft model alone."""

    def __init__(self, step: infer_step.InferStep, vocabulary: int) -> None:
        self._run, self._vocabulary = step.runner.run, vocabulary

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        logits = self._run(inputs)["logits"]
        logits[:, self._vocabulary :] = -1e30
        return {"logits": logits}


class _Forced(Sampler):
    """Draws of a draft model: the right token, or with the chance `wrong` another."""

    def __init__(self, right: list[int], wrong: float) -> None:
        self.right, self.wrong = right, wrong
        self.random = np.random.default_rng(0)

    def draw(
        self, logits: Tensor, sequences: Sequence[Completion], nums_drafts: Sequence[int] | None = None
    ) -> list[int]:
        drawn = []
        for sequence, drafts in zip(sequences, nums_drafts or [0] * len(sequences), strict=True):
            place = sequence.num_output_tokens + drafts
            token = self.right[place] if place < len(self.right) else 3
            drawn.append(token if self.random.random() >= self.wrong else 3 + (token + 1) % 1000)
        return drawn


def _engine(step: _Within, folder: Path, speculation: DraftModel | None) -> Engine:
    shape = infer_step.InferStep(folder, length=1).shape
    return Engine(step, shape, tokenizer=None, eos_ids=[], kv_bytes=KV_BYTES, speculation=speculation)


def _decode(engine: Engine, name: str) -> list[int]:
    """Complete one prompt greedily; its pages of an earlier completion are found again."""
    prompt = (SHAPES["135M"].tokens[:PROMPT]).tolist()
    engine.submit(Request(id=name, prompt=prompt, sampling=Sampling(temperature=0, max_tokens=TOKENS)))
    tokens: list[int] = []
    while not engine.idle:
        for output in engine.step():
            tokens += output.token_ids
    return tokens


def measure(seconds: float) -> list[Bar]:
    """Time completions in turns: without drafts, and with each share of acceptance."""
    large, small = (infer_step.prepare(SHAPES[name], HEAD, THREADS) for name in ("1B", "135M"))
    vocabulary = SHAPES["135M"].sizes["vocab_size"]
    step = _Within(infer_step.InferStep(large, length=1), vocabulary)
    draft = infer_step.InferStep(small, length=1)
    plain = _engine(step, large, None)
    right = _decode(plain, "first")
    sides, models = [_side("none", plain)], dict[str, DraftModel]()
    for share in ACCEPTED:
        model = DraftModel(
            draft.runner, draft.shape, vocab_size=vocabulary, limits=EngineLimits(), kv_bytes=KV_BYTES
        )
        model._sampler = _Forced(right, 1 - share)
        engine, name = _engine(step, large, model), f"{share:.0%} accepted"
        models[name] = model
        for _ in range(2):  # what steps cost is learned
            if _decode(engine, "first") != right:
                raise SystemExit(f"{NAME}, {name}: other tokens than without drafts")
        sides.append(_side(name, engine))
    timed = timing.interleaved_for(sides, seconds)
    medians = timed.seconds
    bars = []
    for share in ACCEPTED:
        name = f"{share:.0%} accepted"
        stats = models[name].stats
        bars.append(
            Bar(
                work=f"{NAME}, {name}",
                rival="without drafts",
                need=FASTER.get(share, 0.98),
                got=medians["none"] / medians[name],
                ours=medians[name] / TOKENS,
                theirs=medians["none"] / TOKENS,
                details={
                    "tokens": TOKENS,
                    "drafted": stats.drafted / max(stats.checks, 1),
                    "accepted": stats.acceptance,
                    "token_cost": stats.token_cost,
                    "quiet": timed.quiet,
                },
            )
        )
    return bars


def _side(name: str, engine: Engine) -> Side:
    return Side(name, lambda: _decode(engine, "again"), lambda: torch.tensor(_decode(engine, "again")))
