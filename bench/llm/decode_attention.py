"""Decode attention alone, 32/8 heads of 128, against torch: the best form of SDPA, and FlexAttention compiled."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from bench.kernels import attention
from bench.kernels.attention import Work
from bench.shared.bars import Bar
from bench.shared.timing import Side, interleaved_for

CONTEXTS = (2048, 8192)
FORMS = ("packed float32", "packed bfloat16", "gqa float32")
OURS = {"float16": "ours float16", "int8": "ours int8"}  # by the cache that we read
FLEX, SDPA = "FlexAttention", "torch SDPA, best form"
NEED = 3.0
CLOSE = 2e-2  # relative; bfloat16 is a form too


def works() -> Iterator[Work]:
    for context in CONTEXTS:
        yield Work("decode", (32, 8), 128, 1, context)


def title(work: Work) -> str:
    return f"decode attention {work.heads[0]}/{work.heads[1]}×{work.dim} {work.context}"


def measure(work: Work, seconds: float) -> list[Bar]:
    """Measure one new token; layers in turn, so that keys and values come from memory for every engine."""
    torch.manual_seed(0)
    query = torch.randn(work.batch * work.new, work.heads[0], work.dim)
    shape = (work.layers, work.batch, work.heads[1], work.context, work.dim)
    keys, values = list(torch.randn(shape)), list(torch.randn(shape))
    expected = attention.exact(work, query, keys[0], values[0])
    sides: dict[str, Side] = {
        name: attention.ours(work, cache, query, keys, values) for cache, name in OURS.items()
    }
    sides |= {form: attention.torch_side(work, form, query, keys, values) for form in FORMS}
    sides[FLEX] = _flex(work, query, keys, values)
    errors = {n: float((s.output() - expected).norm() / expected.norm()) for n, s in sides.items()}
    given = [Side(n, side.run, side.output, side.copies) for n, side in sides.items()]
    timed = interleaved_for(given, seconds)
    details = {"relative_error": errors, **timed._asdict()}
    best = min(FORMS, key=lambda form: timed.seconds[form])
    bars = []
    for cache, rival, engine in (("float16", SDPA, best), ("int8", SDPA, best), ("float16", FLEX, FLEX)):
        name = OURS[cache]
        bar = Bar(
            work=title(work), rival=f"{rival}; our {cache}", need=NEED, details=details | {"best": engine}
        )
        wrong = [n for n in (name, engine) if errors[n] > CLOSE]
        if wrong:
            bars.append(msgspec.structs.replace(bar, why=f"wrong by {errors[wrong[0]]:.2g}: {wrong[0]}"))
            continue
        ours, theirs = timed.seconds[name], timed.seconds[engine]
        bars.append(msgspec.structs.replace(bar, got=theirs / ours, ours=ours, theirs=theirs))
    return bars


def _flex(work: Work, query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Side:
    heads = query.reshape(work.batch, work.new, work.heads[0], work.dim).transpose(1, 2).contiguous()
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(layer: int) -> Tensor:
        with torch.no_grad():
            return compiled(heads, keys[layer], values[layer], enable_gqa=True)

    def run() -> None:
        for layer in range(work.layers):
            attend(layer)

    def output() -> Tensor:
        return attend(0).transpose(1, 2).reshape(-1, work.heads[0], work.dim)

    return Side(FLEX, run, output, work.layers)
