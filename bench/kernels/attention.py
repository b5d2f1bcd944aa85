"""Attention on the CPU, ours over a paged cache, against torch's over dense tensors: SDPA's best form, FlexAttention.

Decode: one new token for each sequence. The forms of SDPA are query heads packed as rows of their KV head, in float32
and bfloat16, and `enable_gqa`; they read dense keys and values, ours finds pages in a shuffled table. Layers are
rotated, so that every cache comes from memory. Prefill: one sequence, causal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from bench.shared.bars import Bar
from bench.shared.timing import Side, interleaved_for
from infer.attention import KV_DTYPES, AttentionArgs, PageLayout, native

PAGE = 32
ROTATED = 96 << 20  # bytes of keys and values that one turn reads at least: more than the last cache holds
MOST_LAYERS = 48
NEED = {"decode": 3.0, "prefill": 1.0}  # times torch's best form
FORMS = {
    "decode": ("packed float32", "packed bfloat16", "gqa float32"),
    "prefill": ("causal float32", "gqa float32"),
}
OURS = {"float16": "ours float16", "int8": "ours int8"}  # by the cache that we read
FLEX, SDPA = "FlexAttention", "torch SDPA, best form"
CLOSE = 2e-2  # relative; bfloat16 is a form too


@dataclass(frozen=True)
class Work:
    kind: str  # "decode" or "prefill"
    heads: tuple[int, int]
    dim: int
    batch: int
    context: int

    @property
    def name(self) -> str:
        many = f"{self.batch}×" if self.batch > 1 else ""
        return f"{self.kind} attention {self.heads[0]}/{self.heads[1]}×{self.dim} {many}{self.context}"

    @property
    def new(self) -> int:
        return 1 if self.kind == "decode" else self.context

    @property
    def layers(self) -> int:
        if self.kind == "prefill":
            return 1
        size = 4 * self.batch * self.context * self.heads[1] * self.dim
        return min(MOST_LAYERS, max(1, -(-ROTATED // size)))


def works() -> Iterator[Work]:
    for heads, dim in (((32, 8), 128), ((32, 8), 64), ((9, 3), 64)):
        for batch, context in ((1, 2048), (1, 8192), (8, 2048)):
            yield Work("decode", heads, dim, batch, context)
        for context in (512, 2048):
            yield Work("prefill", heads, dim, 1, context)


def ours(work: Work, dtype: str, query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Side:
    """Return our attention over keys and values [batch, kv_heads, context, dim] of each layer in shuffled pages."""
    batch, context = work.batch, work.context
    blocks = -(-context // PAGE)
    layout = PageLayout(work.heads[1], work.dim, PAGE, dtype)
    # As the engine's cache: numpy asks for huge pages where they are given on request.
    cache = torch.from_numpy(np.zeros((work.layers, batch * blocks, layout.num_bytes), dtype=np.uint8))
    table = torch.randperm(batch * blocks).to(torch.int32).reshape(batch, blocks)
    place = torch.arange(context)
    slots = table[:, place // PAGE].long() * PAGE + place % PAGE

    def args(layer: int, first: int, window: int = 0) -> AttentionArgs:
        count = context - first
        new = [
            x[layer][:, :, first:].transpose(1, 2).reshape(batch * count, -1, work.dim)
            for x in (keys, values)
        ]
        heads = query if count == work.new else query.new_zeros(batch * count, *query.shape[1:])
        starts = torch.arange(batch + 1, dtype=torch.int32) * count
        return AttentionArgs(
            *(heads, *new, cache, slots[:, first:].reshape(-1), table, starts),
            *(torch.full((batch,), context, dtype=torch.int32), None),
            *(layer, PAGE, KV_DTYPES.index(dtype), work.dim**-0.5, window),
        )

    for layer in range(work.layers if work.new < context else 0):
        native.attend(args(layer, 0, window=1))  # only to fill the cache
    calls = [args(layer, context - work.new) for layer in range(work.layers)]
    given = [
        (a.query, a.key, a.value, a.kv_cache, a.slot_mapping, a.block_table, a.query_start, a.seq_lens, None)
        + (a.layer, a.page, a.dtype, a.scale, 0, 0.0)
        for a in calls
    ]
    attend = torch.ops.infer.attend_native

    def run() -> None:
        for one in given:
            attend(*one)

    return Side(f"ours {dtype}", run, lambda: attend(*given[0]), work.layers)


def torch_side(work: Work, form: str, query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Side:
    """Return torch's side. Forms: `packed float32`, `packed bfloat16`, `gqa float32`; prefill `causal float32`."""
    dtype = getattr(torch, form.split()[1])
    batch, group = work.batch, work.heads[0] // work.heads[1]
    heads = query.reshape(batch, work.new, work.heads[0], work.dim).transpose(1, 2).to(dtype)
    keys, values = [k.to(dtype) for k in keys], [v.to(dtype) for v in values]
    options: dict[str, Any] = {"is_causal": work.kind == "prefill"}
    if form.startswith("gqa"):
        options["enable_gqa"] = True
    elif work.kind == "prefill":
        keys, values = ([x.repeat_interleave(group, 1) for x in both] for both in (keys, values))
    else:
        heads = heads.reshape(batch, work.heads[1], group, work.dim)

    def attend(layer: int) -> Tensor:
        return F.scaled_dot_product_attention(heads, keys[layer], values[layer], **options)

    def run() -> None:
        for layer in range(work.layers):
            attend(layer)

    def output() -> Tensor:
        flat = attend(0).float().reshape(batch, work.heads[0], work.new, work.dim)
        return flat.transpose(1, 2).reshape(-1, work.heads[0], work.dim)

    return Side(f"torch {form}", run, output, work.layers)


def exact(work: Work, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    group = work.heads[0] // work.heads[1]
    heads = query.reshape(work.batch, work.new, work.heads[0], work.dim).transpose(1, 2)
    got = F.scaled_dot_product_attention(
        heads, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1), is_causal=work.new > 1
    )
    return got.transpose(1, 2).reshape(-1, work.heads[0], work.dim)


def measure(work: Work, seconds: float) -> list[Bar]:
    """Return a bar for each cache of ours and each rival; an engine that is wrong is not compared."""
    torch.manual_seed(0)
    query = torch.randn(work.batch * work.new, work.heads[0], work.dim)
    shape = (work.layers, work.batch, work.heads[1], work.context, work.dim)
    keys, values = list(torch.randn(shape)), list(torch.randn(shape))
    expected = exact(work, query, keys[0], values[0])
    sides: dict[str, Side] = {name: ours(work, cache, query, keys, values) for cache, name in OURS.items()}
    forms, rivals = FORMS[work.kind], [("float16", SDPA), ("int8", SDPA)]
    sides |= {form: torch_side(work, form, query, keys, values) for form in forms}
    if work.kind == "decode":
        sides[FLEX] = _flex(work, query, keys, values)
        rivals.append(("float16", FLEX))
    errors = {n: float((s.output() - expected).norm() / expected.norm()) for n, s in sides.items()}
    given = [Side(n, side.run, side.output, side.copies) for n, side in sides.items()]
    timed = interleaved_for(given, seconds)
    details = {"relative_error": errors, **timed._asdict()}
    best = min(forms, key=lambda form: timed.seconds[form])
    bars = []
    for cache, rival in rivals:
        name, engine = OURS[cache], FLEX if rival == FLEX else best
        bar = Bar(
            work=work.name,
            rival=f"{rival}; our {cache}",
            need=NEED[work.kind],
            details=details | {"best": engine},
        )
        wrong = [n for n in (name, engine) if errors[n] > CLOSE]
        if wrong:
            bars.append(msgspec.structs.replace(bar, why=f"wrong by {errors[wrong[0]]:.2g}: {wrong[0]}"))
            continue
        own, theirs = timed.seconds[name], timed.seconds[engine]
        bars.append(msgspec.structs.replace(bar, got=theirs / own, ours=own, theirs=theirs))
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
