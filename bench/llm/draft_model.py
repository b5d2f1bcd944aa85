"""Decoding of a 1B shape with drafts of a 135M shape: tokens a second with and without, by how many are accepted.

Random weights do not agree, and their logits lie so close that rounding decides, so the text is given: both models
compute their steps as ever, the large one then chooses the next token of a text, and the small one draws it, or, with
the given chance, another. Everything else is the engine's own: it verifies, rejects, times, and decides how long drafts
are.
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
TEXT = SHAPES["135M"].tokens  # of ids that both have


class _Writing:
    """Step of a model that writes `TEXT`."""

    def __init__(self, step: infer_step.InferStep) -> None:
        self._run = step.runner.run

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        logits = self._run(inputs)["logits"]
        places = inputs["positions"][inputs["logit_rows"]] + 1
        logits[torch.arange(len(places)), TEXT[places]] = 1e30
        return {"logits": logits}


class _Forced(Sampler):
    """Draws of a draft model: the next token of `TEXT`, or with the chance `wrong` another."""

    def __init__(self, wrong: float) -> None:
        self.wrong, self.random = wrong, np.random.default_rng(0)

    def draw(
        self, logits: Tensor, sequences: Sequence[Completion], nums_drafts: Sequence[int] | None = None
    ) -> list[int]:
        drawn = []
        for sequence, drafts in zip(sequences, nums_drafts or [0] * len(sequences), strict=True):
            token = int(TEXT[len(sequence.tokens) + drafts])
            drawn.append(token if self.random.random() >= self.wrong else token - 1)
        return drawn


def _engine(step: _Writing, folder: Path, speculation: DraftModel | None) -> Engine:
    shape = infer_step.InferStep(folder, length=1).shape
    return Engine(step, shape, tokenizer=None, eos_ids=[], kv_bytes=KV_BYTES, speculation=speculation)


def _decode(engine: Engine, name: str) -> list[int]:
    """Complete one prompt greedily; its pages of an earlier completion are found again."""
    prompt = TEXT[:PROMPT].tolist()
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
    step = _Writing(infer_step.InferStep(large, length=1))
    draft = infer_step.InferStep(small, length=1)
    plain, written = _engine(step, large, None), TEXT[PROMPT : PROMPT + TOKENS].tolist()
    sides, models = [_side("none", plain)], dict[str, DraftModel]()
    for share in ACCEPTED:
        model = DraftModel(
            draft.runner, draft.shape, vocab_size=vocabulary, limits=EngineLimits(), kv_bytes=KV_BYTES
        )
        model._sampler = _Forced(1 - share)
        engine, name = _engine(step, large, model), f"{share:.0%} accepted"
        models[name] = model
        for _ in range(2):  # what steps cost is learned
            if _decode(engine, "first") != written:
                raise SystemExit(f"{NAME}, {name}: another text than without drafts")
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
                    "written": TOKENS,
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
