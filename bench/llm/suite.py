"""Bars of language models in one table: our step and engine against llama.cpp, transformers and torch's attention.

    python -m bench.llm.suite [--only 'decode 135M*,prefill*'] [--seconds 30] [--prepare | --render]

Random weights of two Llama shapes; llama.cpp reads GGUF files of the very same weights. Each piece of work is one
interleaved run on two threads, and an engine whose output is wrong is not timed. Merges into
bench/results/lm-DATE-CPU.json and .md; exits 1 when a bar is missed or a rival is absent.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from bench.kernels import attention
from bench.llm import (
    decode_prefill,
    decoder_shapes,
    draft_model,
    engine_overhead,
    llama_cpp_model,
    same_gguf_file,
    transformers_decode,
)
from bench.shared import suite
from bench.shared.bars import Bar, todays_bars
from bench.shared.suite import THREADS, Measure

KINDS = (
    "decode 135M",
    "decode 1B",
    "prefill 135M",
    "prefill 1B",
    "same",
    "decode attention",
    "prefill attention",
    "shared",
    "engine",
    "draft model",
)


def works() -> Iterator[tuple[str, Measure]]:
    """Yield every piece of work by name, in the order of the table."""
    for case in decode_prefill.cases():
        yield case.name, lambda seconds, case=case: decode_prefill.measure(case, seconds)
    for work in same_gguf_file.cases():
        yield work.name, lambda seconds, work=work: same_gguf_file.measure(work, seconds)
    yield transformers_decode.NAME, transformers_decode.measure
    for size in attention.works():
        yield size.name, lambda seconds, size=size: attention.measure(size, seconds)
    yield engine_overhead.PREFIX, engine_overhead.prefix
    yield engine_overhead.OVERHEAD, engine_overhead.overhead
    yield draft_model.NAME, draft_model.measure


def prepare(names: Sequence[str]) -> None:
    """Make all that takes minutes and is kept: files, compiled steps, filled caches."""
    for shape in decoder_shapes.SHAPES.values():
        if any(case.shape is shape and case.name in names for case in decode_prefill.cases()):
            print(shape.name, flush=True)
            decode_prefill.prepare(shape)
    for work in same_gguf_file.cases():
        if work.name in names and llama_cpp_model.missing() is None:
            print(work.name, flush=True)
            same_gguf_file.prepare(work)


def table(bars: list[Bar]) -> str:
    """Return the table under the bars: tokens per second of every engine; "" where none was measured."""
    timed = [bar for bar in bars if "tokens" in bar.details]
    return "\n" + decode_prefill.table(timed) if timed else ""


def main() -> int:
    rows = todays_bars("lm", KINDS, table, threads=THREADS)
    rows.head["versions"] |= llama_cpp_model.versions()
    return suite.run(__doc__, works(), rows, prepare, table)


if __name__ == "__main__":
    sys.exit(main())
