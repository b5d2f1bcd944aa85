"""Bars of language models in one table: our step and engine against llama.cpp, transformers and torch's attention.

    python -m bench.llm.suite [--only 'decode 135M*,prefill*'] [--seconds 30] [--prepare | --render]

Random weights of two Llama shapes for speed, the trained pydoc_lm for quality; llama.cpp reads GGUF files of the very
same weights. Each piece of work is one interleaved run on two threads, and an engine whose output is wrong is not
timed. Merges into bench/results/lm-DATE-CPU.json and .md; exits 1 when a bar is missed or a rival is absent.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from collections.abc import Callable, Iterator

import torch

from bench.llm import (
    decode_attention,
    decode_prefill,
    decoder_shapes,
    engine_overhead,
    llama_cpp_model,
    perplexity,
    same_gguf_file,
    transformers_decode,
)
from bench.shared import bars
from bench.shared.bars import Bar
from bench.shared.repository import ROOT
from bench.shared.results import machine_header

THREADS = decode_prefill.THREADS
KINDS = (
    "decode 135M",
    "decode 1B",
    "prefill 135M",
    "prefill 1B",
    "same",
    "decode attention",
    "4 bit file",
    "shared",
    "engine",
)
Measure = Callable[[float], list[Bar]]


def works() -> Iterator[tuple[str, Measure]]:
    """Yield every piece of work by name, in the order of the table."""
    for case in decode_prefill.cases():
        yield case.name, lambda seconds, case=case: decode_prefill.measure(case, seconds)
    for work in same_gguf_file.cases():
        yield work.name, lambda seconds, work=work: same_gguf_file.measure(work, seconds)
    yield transformers_decode.NAME, transformers_decode.measure
    for size in decode_attention.works():
        yield decode_attention.title(size), lambda seconds, size=size: decode_attention.measure(size, seconds)
    yield perplexity.NAME, lambda seconds: perplexity.measure()
    yield engine_overhead.PREFIX, engine_overhead.prefix
    yield engine_overhead.OVERHEAD, engine_overhead.overhead


def prepare(names: list[str]) -> None:
    """Make all that takes minutes and is kept: files, compiled steps, filled caches."""
    for shape in decoder_shapes.SHAPES.values():
        if any(case.shape is shape and case.name in names for case in decode_prefill.cases()):
            print(shape.name, flush=True)
            decode_prefill.prepare(shape)
    for work in same_gguf_file.cases():
        if work.name in names and llama_cpp_model.missing() is None:
            print(work.name, flush=True)
            same_gguf_file.prepare(work)
    if perplexity.NAME in names:
        print(perplexity.NAME, flush=True)
        perplexity.prepare()


def tables(bars: list[Bar]) -> str:
    """Return the tables under the bars: tokens per second of every engine, bytes and perplexity of every file."""
    parts = [decode_prefill.table([bar for bar in bars if "tokens" in bar.details])]
    parts += [perplexity.table(bar) for bar in bars if "ours" in bar.details][:1]
    return "".join(f"\n{part}" for part in parts)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="*", help="names of work, with wildcards, separated by commas")
    parser.add_argument("--seconds", type=float, default=30.0, help="of timing for each piece of work")
    parser.add_argument("--render", action="store_true", help="measure nothing, print today's table")
    parser.add_argument("--prepare", action="store_true", help="only make what takes minutes and is kept")
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    patterns = arguments.only.split(",")
    chosen = [(n, call) for n, call in works() if any(fnmatch.fnmatch(n, p) for p in patterns)]
    if not chosen:
        parser.error(f"nothing is named {arguments.only!r}. Known: " + ", ".join(name for name, _ in works()))
    if arguments.prepare:
        prepare([name for name, _ in chosen])
        return 0
    head = machine_header(threads=THREADS)
    head["versions"] |= llama_cpp_model.versions()
    path, kept = bars.keep([], head, "lm", KINDS, tables)
    for name, measure in [] if arguments.render else chosen:
        print(name, file=sys.stderr, flush=True)
        path, kept = bars.keep(measure(arguments.seconds), head, "lm", KINDS, tables)
    wanted = {name for name, _ in chosen}
    shown = [bar for bar in kept if bar.work in wanted]
    print(bars.table(shown) + tables(shown))
    print(f"written: {path.relative_to(ROOT)}")
    absent = wanted - {bar.work for bar in shown}
    for name in sorted(absent):
        print(f"not measured: {name}", file=sys.stderr)
    return 0 if all(bar.is_met for bar in shown) and not absent else 1


if __name__ == "__main__":
    sys.exit(main())
