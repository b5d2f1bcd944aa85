"""Attention on the CPU: ours over a paged cache against torch's scaled_dot_product_attention over dense tensors.

    python -m bench.kernels.attention [--only decode|prefill] [--match TEXT] [--rounds 9]

Decode: one new token for each sequence. The rivals are the forms that torch has: query heads packed as rows of their KV
head, in float32 and bfloat16, and `enable_gqa`; they read dense keys and values, ours finds pages in a shuffled table.
Layers are rotated, so that every cache comes from memory. Prefill: one sequence, causal. Results are compared with the
reference first; sides are timed in turns. Writes bench/results/attention-DATE-CPU.{json,md};
exits 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bench.shared.results import result_path
from bench.shared.rivals import Rivals
from bench.shared.timing import READ_BYTES, Side, reader
from infer import device as hardware
from infer.attention import KV_DTYPES, AttentionArgs, PageLayout, native
from infer.kernels import cpu as library

PAGE = 32
ROTATED = 96 << 20  # bytes of keys and values that one turn reads at least: more than the last cache holds
MOST_LAYERS = 48
BARS = {"decode": 3.0, "prefill": 1.0}  # times torch's best form; decode at a context of 2048 or more
CLOSE = {"float16": 1e-3, "int8": 2e-2}


@dataclass(frozen=True)
class Work:
    kind: str
    heads: tuple[int, int]
    dim: int
    batch: int
    context: int

    @property
    def name(self) -> str:
        return f"{self.kind} {self.heads[0]}/{self.heads[1]}x{self.dim} batch {self.batch} at {self.context}"

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
        for batch, context in ((1, 128), (1, 2048), (1, 8192), (8, 2048)):
            yield Work("decode", heads, dim, batch, context)
    for heads, dim in (((32, 8), 128), ((32, 8), 64), ((9, 3), 64)):
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


def torch_sides(work: Work, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> list[Side]:
    """Return all forms of torch in this process, over copies of key and value for each layer."""
    keys, values = ([torch.from_numpy(x).clone() for _ in range(work.layers)] for x in (key, value))
    decode, prefill = ["packed float32", "packed bfloat16", "gqa float32"], ["causal float32", "gqa float32"]
    forms = decode if work.kind == "decode" else prefill
    return [torch_side(work, form, torch.from_numpy(query), keys, values) for form in forms]


def exact(work: Work, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    group = work.heads[0] // work.heads[1]
    heads = query.reshape(work.batch, work.new, work.heads[0], work.dim).transpose(1, 2)
    got = F.scaled_dot_product_attention(
        heads, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1), is_causal=work.new > 1
    )
    return got.transpose(1, 2).reshape(-1, work.heads[0], work.dim)


def measure(work: Work, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    query = torch.randn(work.batch * work.new, work.heads[0], work.dim)
    shape = (work.batch, work.heads[1], work.context, work.dim)
    key, value = torch.randn(shape), torch.randn(shape)
    keys, values = [key.clone() for _ in range(work.layers)], [value.clone() for _ in range(work.layers)]
    expected = exact(work, query, key, value)
    sides, errors = [ours(work, dtype, query, keys, values) for dtype in CLOSE], {}
    for side, (dtype, bound) in zip(sides, CLOSE.items(), strict=True):
        errors[dtype] = float((side.output() - expected).norm() / expected.norm())
        if not errors[dtype] < bound:
            raise SystemExit(f"{work.name}: {side.name} is wrong by {errors[dtype]:.2g}: nothing is timed")
    with Rivals() as rivals:
        rivals.start("torch", torch_sides, work, query.numpy(), key.numpy(), value.numpy())
        others = [*sides, *([reader()] if work.kind == "decode" else [])]
        seconds = rivals.interleaved(others, rounds)
    reading = seconds.pop("reading memory", None)
    best = min((value for name, value in seconds.items() if name.startswith("torch")), default=None)
    row: dict[str, Any] = {"work": work.name, "kind": work.kind, "context": work.context}
    row |= {"errors": errors, "seconds": seconds, "crashed": rivals.crashed}
    if best is not None:
        row["times torch"] = {n: best / value for n, value in seconds.items() if n.startswith("ours")}
    if reading:
        row["GB/s read"] = READ_BYTES / reading / 1e9
        row["GB/s"] = {
            dtype: work.batch * work.context * PageLayout(work.heads[1], work.dim, 1, dtype).num_bytes
            / seconds[f"ours {dtype}"] / 1e9
            for dtype in CLOSE
        }  # fmt: skip
    return row


def line(row: dict[str, Any]) -> str:
    micro = {name: f"{value * 1e6:.0f}" for name, value in row["seconds"].items()}
    rivals = " / ".join(value for name, value in micro.items() if name.startswith("torch"))
    rivals, rate = rivals or row["crashed"]["torch"], row.get("GB/s", {})
    times = [f"{times:.2f}x" for times in row.get("times torch", {}).values()] or ["", ""]
    cells = [row["work"], micro["ours float16"], micro["ours int8"], rivals]
    cells += [*times, f"{rate['float16']:.1f} / {rate['int8']:.1f} of {row['GB/s read']:.1f}" if rate else ""]
    return "| " + " | ".join(cells) + " |"


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """Return a sentence for each row below its bar, and for each whose rival crashed."""
    sentences = [f"{row['work']}: torch {row['crashed']['torch']}" for row in rows if row.get("crashed")]
    return sentences + [
        f"{row['work']}: {row['times torch']['ours float16']:.2f}x, the bar is {BARS[row['kind']]}x"
        for row in rows
        if (row["kind"] == "prefill" or row["context"] >= 2048)
        and row.get("times torch", {}).get("ours float16", math.inf) < BARS[row["kind"]]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["decode", "prefill"])
    parser.add_argument("--match", default="")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--merge", action="store_true", help="keep the rows of today's file that are not measured"
    )
    chosen = parser.parse_args()
    if reason := native.missing():
        raise SystemExit(f"native attention is not usable: {reason}")
    target = result_path("attention")
    old = json.loads(target.read_text())["rows"] if chosen.merge and target.exists() else []
    rows: dict[str, dict[str, Any]] = {row["work"]: row for row in old}
    title = (
        "| work | fp16, us | int8, us | torch forms, us | fp16 over torch | int8 over torch | GB/s of KV |"
    )
    print(title + "\n|---|---|---|---|---|---|---|")
    for work in works():
        if chosen.only in (None, work.kind) and chosen.match in work.name:
            rows[work.name] = measure(work, chosen.rounds)
            print(line(rows[work.name]), flush=True)
    ordered = [rows[work.name] for work in works() if work.name in rows]
    head = {"torch": str(torch.__version__), "threads": torch.get_num_threads(), "isa": library.isa()}
    head |= {k: str(v) for k, v in hardware.fingerprint("cpu").items()}
    target.write_text(json.dumps({"machine": head, "rows": ordered}, indent=1) + "\n")
    said = [f"Attention, {datetime.date.today()}: {head}", "", title, "|---|---|---|---|---|---|---|"]
    target.with_suffix(".md").write_text("\n".join([*said, *map(line, ordered)]) + "\n")
    for sentence in missed(ordered):
        print(f"missed: {sentence}")
    return int(bool(missed(ordered)))


if __name__ == "__main__":
    sys.exit(main())
