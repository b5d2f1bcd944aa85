"""Decode of the 135M shape in transformers, float32: eager with its dynamic cache, compiled with a static one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bench.kernels.linear_infer import relative
from bench.llm import infer_step
from bench.llm.decoder_shapes import SHAPES
from bench.shared.bars import Bar
from bench.shared.timing import Side, interleaved_for

NAME = "decode 135M, against transformers"
CONTEXT = 128
NEED = {"transformers eager": 12.0, "transformers compiled": 8.0}
CLOSE = 1e-3  # of the two forms of transformers, relative


def measure(seconds: float) -> list[Bar]:
    shape = SHAPES["135M"]
    tokens, expected = shape.tokens, shape.logits()[CONTEXT]
    step = infer_step.InferStep(
        infer_step.prepare(shape, "8 bit head", torch.get_num_threads()), length=CONTEXT + 1
    )
    step.prefill(tokens[:CONTEXT].tolist())()
    model = shape.model()
    calls: dict[str, Callable[[], Tensor]] = {
        "ours": step.decoding(int(tokens[CONTEXT]), CONTEXT),
        "transformers eager": _eager(model, tokens),
        "transformers compiled": _compiled(model, tokens),
    }
    errors = {name: relative(call()[-1], expected) for name, call in calls.items()}
    timed = interleaved_for([Side(name, call, lambda: expected) for name, call in calls.items()], seconds)
    step.close()
    details = {"relative_error": errors, **timed._asdict()}
    bars = []
    for rival, need in NEED.items():
        bar = Bar(work=NAME, rival=rival, need=need, details=details)
        if errors[rival] > CLOSE:
            bar.why = f"the rival is wrong by {errors[rival]:.2g}"
        else:
            bar.ours, bar.theirs = timed.seconds["ours"], timed.seconds[rival]
            bar.got = bar.theirs / bar.ours
        bars.append(bar)
    return bars


def _eager(model: nn.Module, tokens: Tensor) -> Callable[[], Tensor]:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens[None, :CONTEXT], past_key_values=cache)
    place = torch.tensor([[CONTEXT]])

    def run() -> Tensor:
        with torch.no_grad():
            logits = model(
                tokens[None, CONTEXT : CONTEXT + 1], past_key_values=cache, position_ids=place
            ).logits
        cache.crop(-1)
        return logits[0]

    return run


def _compiled(model: nn.Module, tokens: Tensor) -> Callable[[], Tensor]:
    """Return the decode step as `generate` compiles it: a static cache of the context and a bit, one graph."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=CONTEXT + 32)
    with torch.no_grad():
        model(tokens[None, :CONTEXT], past_key_values=cache)
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    token, place = tokens[None, CONTEXT : CONTEXT + 1].clone(), torch.tensor([[CONTEXT]])
    lengths = [layer.cumulative_length for layer in cache.layers]
    kept = [length.clone() for length in lengths]

    def run() -> Tensor:
        for length, value in zip(lengths, kept, strict=True):
            length.copy_(value)  # so that every call writes the same place
        with torch.no_grad():
            return compiled(token, past_key_values=cache, position_ids=place).logits[0]

    run()
    return run
