"""Decode attention and whole decode steps of language models on a GPU: correctness, then share of the bandwidth.

    python -m bench.gpu.decode_step [--shapes 1B,8B] [--batches 1,8,64] [--contexts 2048,8192]
                           [--artifact NAME.infer] [--no-step]

Attention: our split-KV kernels over pages against torch's SDPA on a dense cache (queries of a key head packed) and
`torch.nn.attention.varlen` over pages, where this torch has it. One measurement is a CUDA graph of calls that rotate
over the layers of a cache of more bytes than the L2 cache holds. Step: random weights of the shape in bfloat16, one
token for each sequence, under our CUDA graphs, against transformers' own forward with a static cache and SDPA, as it is
and compiled with CUDA graphs inside; or the step of an artifact. The share is the bytes that must be read (cache, or
weights and cache) over the time, against the bytes that a copy on the device moves. Writes
bench/results/gpu-lm-DATE.json and .md after each row; a row that does not fit into memory says so. Exits 1 when a
result is wrong, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.shared.command_line import parser_of
from bench.shared.repository import RESULTS
from infer.kernels import gpu

if reason := gpu.why_not():  # before the imports that need Triton
    print(f"Language models can't be measured on a GPU here: {reason}.", file=sys.stderr)
    sys.exit(2)

from dataclasses import replace

from bench.gpu.copy_bandwidth import copy_bandwidth
from bench.gpu.static_cache_step import COMPILED, StaticCacheStep
from infer.attention import KV_DTYPES, AttentionArgs, PageLayout, reference
from infer.attention import triton as ours
from infer.graph import devices
from infer.graph.program import flatten
from infer.kernels.gpu.kernel_thresholds import graph_seconds
from infer.llm.step import cuda_graphs
from infer.llm.step.full_sequence_runner import FullSequenceRunner
from infer.llm.step.paged_step import capture_step
from infer.llm.step.probe import probe
from infer.llm.step.step_shape import StepShape

# layers, hidden, intermediate, query heads, key heads, numbers of a head, vocabulary
SHAPES = {
    "135M": (30, 576, 1536, 9, 3, 64, 49152),
    "1B": (16, 2048, 8192, 32, 8, 64, 128256),
    "8B": (32, 4096, 14336, 32, 8, 128, 128256),
}
PAGE, ROTATED, ROUNDS = 32, 256 << 20, 30
TOLERANCE = {"bfloat16": 1e-2, "int8": 3e-2}


def arguments(shape: str, batch: int, context: int, kind: str, layers: int) -> AttentionArgs:
    """Return the arguments of a decode step of `batch` sequences of `context` tokens, random keys and values."""
    _, _, _, heads, kv_heads, width, _ = SHAPES[shape]
    layout = PageLayout(kv_heads, width, PAGE, kind)
    blocks = -(-context // PAGE)
    cache = torch.zeros(layers, batch * blocks, layout.num_bytes, dtype=torch.uint8, device="cuda")
    for layer in cache:
        parts = layout.parts(layer)
        for codes, steps in ((parts.key, parts.key_step), (parts.value, parts.value_step)):
            if steps is None:
                codes.normal_()
            else:
                codes.random_(-127, 128)
                steps.fill_(0.02)
    table = torch.randperm(batch * blocks, device="cuda").int().reshape(batch, blocks)
    place = context - 1
    query, key, value = (
        torch.randn(batch, count, width, device="cuda", dtype=torch.bfloat16)
        for count in (heads, kv_heads, kv_heads)
    )
    return AttentionArgs(
        *(query, key, value, cache),
        slot_mapping=table[:, place // PAGE].long() * PAGE + place % PAGE,
        block_table=table,
        query_start=torch.arange(batch + 1, dtype=torch.int32, device="cuda"),
        seq_lens=torch.full((batch,), context, dtype=torch.int32, device="cuda"),
        sinks=None,
        layer=0,
        page=PAGE,
        dtype=KV_DTYPES.index(kind),
        scale=width**-0.5,
    )


def check() -> list[str]:
    """Compare odd contexts with the float32 reference on the CPU; return a sentence for each wrong result."""
    wrong = []
    for shape in SHAPES:
        for kind, tolerance in TOLERANCE.items():
            for batch, context in ((1, 1), (3, 33), (2, 1999)):
                args = arguments(shape, batch, context, kind, 1)
                moved = {
                    n: v.cpu()
                    for n in AttentionArgs.__dataclass_fields__
                    if isinstance(v := getattr(args, n), Tensor)
                }
                moved |= {n: moved[n].float() for n in ("query", "key", "value")}
                want = reference.attend(replace(args, **moved))
                for splits in (1, 5, 16):
                    got = ours.run(args, ours.tiling(args), splits, 16).float().cpu()
                    error = float((got - want).norm() / want.norm())
                    if not error <= tolerance:
                        wrong.append(
                            f"{shape} {kind} {batch} x {context}, {splits} pieces: error {error:.1e}"
                        )
    return wrong


def sdpa(args: AttentionArgs, layers: int) -> list[Callable[[], object]]:
    """Return calls of torch's attention on dense keys and values, the query heads of a key head as its rows."""
    batch, context = args.block_table.shape[0], int(args.seq_lens[0])
    kv_heads, width = args.key.shape[1:]
    query = args.query.unflatten(1, (kv_heads, -1))
    dense = [
        torch.randn(2, batch, kv_heads, context, width, device="cuda", dtype=torch.bfloat16)
        for _ in range(layers)
    ]
    return [
        lambda pair=pair: F.scaled_dot_product_attention(query, pair[0], pair[1], scale=args.scale)
        for pair in dense
    ]


def varlen(args: AttentionArgs, layers: int) -> list[Callable[[], object]] | None:
    """Return torch's variable-length attention over pages, or None where this torch or GPU has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    pages, (kv_heads, width) = args.kv_cache.shape[1], args.key.shape[1:]
    # It takes pages of 256 tokens and more on some GPUs: the same tokens in larger pages.
    page = 256
    count = max(pages * PAGE // page, len(args.block_table))
    table = torch.arange(count, dtype=torch.int32, device="cuda").reshape(len(args.block_table), -1)
    context = int(args.seq_lens[0])
    dense = [
        torch.randn(2, count, page, kv_heads, width, device="cuda", dtype=torch.bfloat16)
        for _ in range(layers)
    ]

    def call(pair: Tensor) -> object:
        return varlen_attn(
            *(args.query, pair[0], pair[1], args.query_start, None, 1, context),
            scale=args.scale,
            window_size=(-1, 0),
            enable_gqa=True,
            seqused_k=args.seq_lens,
            block_table=table,
        )

    try:
        call(dense[0])
    except (RuntimeError, TypeError, ValueError) as error:
        print(f"varlen_attn does not run here: {str(error).splitlines()[0]}", flush=True)
        return None
    return [lambda pair=pair: call(pair) for pair in dense]


def attention_row(shape: str, batch: int, context: int, copy: float) -> dict[str, object]:
    _, _, _, _, kv_heads, width, _ = SHAPES[shape]
    row: dict[str, object] = {"shape": shape, "batch": batch, "context": context}
    for kind in TOLERANCE:
        size = PageLayout(kv_heads, width, PAGE, kind).num_bytes / PAGE * batch * context
        layers = int(min(max(ROTATED // size, 1), 32))
        args = arguments(shape, batch, context, kind, layers)
        calls = [functools.partial(ours.attend, replace(args, layer=i)) for i in range(layers)]
        seconds = graph_seconds(calls)
        row |= {f"{kind}_us": seconds * 1e6, f"{kind}_share": size / seconds / copy}
        if kind == "bfloat16":
            row["sdpa_us"] = graph_seconds(sdpa(args, layers)) * 1e6
            if rival := varlen(args, layers):
                row["varlen_us"] = graph_seconds(rival) * 1e6
    return row


def median_seconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times[3:])


def cache_bytes(shape: StepShape, batch: int, context: int) -> float:
    return shape.layers * shape.page_bytes / shape.page * batch * context


def room_missing(needed: float) -> str:
    """Return `needs 154 GB, 139 GB are free`, or "" where it fits."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    return "" if needed < 0.95 * free else f"needs {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB are free"


def model_rows(
    name: str, batches: list[int], contexts: list[int], copy: float
) -> Iterator[dict[str, object]]:
    """Measure random bfloat16 weights: our step under CUDA graphs, then transformers' forward, as it is and compiled.

    One after the other, because the caches together do not fit where one does.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    layers, hidden, inner, heads, kv_heads, width, vocabulary = SHAPES[name]
    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=width, vocab_size=vocabulary, max_position_embeddings=1 << 15,
    )  # fmt: skip
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
    weights = sum(p.numel() * p.element_size() for p in model.parameters()) - vocabulary * hidden * 2
    model.cpu()
    shape = probe(model, kv_dtype="bfloat16")
    graph = capture_step(model, shape)
    model.cuda()
    run = devices.moved(graph.exported, "cuda").module()

    class Step:
        def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
            with torch.no_grad():
                return {"logits": flatten(run(**{n: v.to("cuda") for n, v in inputs.items()}))[0]}

        def close(self) -> None: ...

    for batch in batches:
        for context in contexts:
            row: dict[str, object] = {"model": name, "batch": batch, "context": context}
            needed = weights + cache_bytes(shape, batch, context)
            if reason := room_missing(cache_bytes(shape, batch, context + 2 * ROUNDS)):
                yield row | {"skipped": reason}
                continue
            step = cuda_graphs.wrap(Step(), "cuda")
            ours_ = median_seconds(FullSequenceRunner(step, shape, "cuda").decoding(batch, context))
            graphs = [f"{f.what}: {f.value} {f.why}" for f in step.findings]
            del step
            torch.cuda.empty_cache()
            rival = median_seconds(StaticCacheStep(model, batch, context, 2 * ROUNDS))
            torch.cuda.empty_cache()
            yield row | {
                "ms": ours_ * 1e3, "share": needed / ours_ / copy, "transformers_ms": rival * 1e3,
                "speedup": rival / ours_, **compiled_rival(model, batch, context, ours_), "graphs": graphs,
            }  # fmt: skip


def compiled_rival(model: Any, batch: int, context: int, ours_: float) -> dict[str, object]:
    """Measure transformers' compiled forward, or say why it can't be."""
    try:
        seconds = median_seconds(StaticCacheStep(model, batch, context, 2 * ROUNDS, COMPILED))
    except Exception as error:  # noqa: BLE001 - whatever the compiler raises, the next row must be measured
        first = (str(error).strip().splitlines() or [""])[0][:200]
        return {"compiled": f"{type(error).__name__}: {first}"}
    finally:
        torch.compiler.reset()
        torch.cuda.empty_cache()
    return {"compiled_ms": seconds * 1e3, "speedup_over_compiled": seconds / ours_}


def artifact_rows(
    path: Path, batches: list[int], contexts: list[int], copy: float
) -> Iterator[dict[str, object]]:
    from infer.predict.open_artifact import generation_shape
    from infer.predict.predictor import Predictor
    from infer.report.measurements import memory

    weights = sum(memory.stored_weights(path).values())
    with Predictor.load(path, device="cuda") as predictor:
        shape = generation_shape(predictor.manifest)
        for batch in batches:
            for context in contexts:
                seconds = median_seconds(predictor._runner.decoding(batch, context))
                share = (weights + cache_bytes(shape, batch, context)) / seconds / copy
                yield {
                    "model": predictor.name,
                    "batch": batch,
                    "context": context,
                    "ms": seconds * 1e3,
                    "share": share,
                }


def table(rows: list[dict[str, object]]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row if name != "graphs"))

    def cell(value: object) -> str:
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    head = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    return [*head, *(f"| {' | '.join(cell(row.get(n, '')) for n in names)} |" for row in rows), ""]


def main() -> int:
    parser = parser_of(__doc__)
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--shapes", default="1B,8B", type=lambda text: text.split(","))
    parser.add_argument("--batches", default="1,8,64", type=numbers)
    parser.add_argument("--contexts", default="2048,8192", type=numbers)
    parser.add_argument("--artifact", type=Path)
    parser.add_argument("--no-step", action="store_true", help="attention alone")
    given = parser.parse_args()
    torch.manual_seed(0)
    wrong, copy = check(), copy_bandwidth()
    print(f"{len(wrong)} wrong; copy {copy / 1e12:.2f} TB/s", *wrong, sep="\n", flush=True)
    head = {
        "date": str(datetime.date.today()),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    found: dict[str, Any] = {**head, "copy": copy, "wrong": wrong, "attention": [], "steps": []}
    for part, row in measured(given, copy):
        print(row, flush=True)
        found[part].append(row)
        page = write(found)
    print(page)
    return 1 if wrong else 0


def measured(given: argparse.Namespace, copy: float) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield ("attention" or "steps", row) of everything that was asked for."""
    for shape in given.shapes:
        for batch in given.batches:
            for context in given.contexts:
                yield "attention", attention_row(shape, batch, context, copy)
    if given.artifact:
        for row in artifact_rows(given.artifact, given.batches, given.contexts, copy):
            yield "steps", row
    elif not given.no_step:
        for shape in given.shapes:
            for row in model_rows(shape, given.batches, given.contexts, copy):
                yield "steps", row


def write(found: dict[str, Any]) -> str:
    """Write both result files of today; return the Markdown."""
    out = RESULTS / f"gpu-lm-{found['date']}"
    out.with_suffix(".json").write_text(json.dumps(found, indent=1))
    title = f"# Language models on {found['gpu']}, {found['date']}, torch {found['torch']}"
    parts = [title, "", f"Copy on the device: {found['copy'] / 1e12:.2f} TB/s.", *found["wrong"], ""]
    for rows in (found["attention"], found["steps"]):
        parts += table(rows) if rows else []
    page = "\n".join(parts) + "\n"
    out.with_suffix(".md").write_text(page)
    return page


if __name__ == "__main__":
    sys.exit(main())
