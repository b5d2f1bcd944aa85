"""`infer bench`: the measurement that fits an artifact, and its tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from .. import bench
from ..artifact import store
from ..bench import llm
from ..errors import UsageError
from ..latency import Paired
from ..options.values import parse_batches
from ..predict.open_artifact import generation_shape
from ..report.rendering import formatting
from ..report.rendering.text_layout import Column, Table, show, show_lines, width_of, wrap
from ..spec import Finding

Measured = bench.Bench | llm.LanguageBench


def measure(path: Path, *, batch: str | None, context: str | None, tokens: int, **rest: Any) -> Measured:
    """Measure the steps of a language model that generates, the calls of anything else."""
    if generation_shape(store.read_manifest(path)) is None:
        if context is not None:
            raise UsageError("--context is for language models that generate", where=str(path))
        return bench.run(path, batches=parse_batches(batch or "1,2,4,8,16"), **rest)
    contexts = None if context is None else parse_batches(context)
    batches = parse_batches(batch or "1,8")
    return llm.run(path, batches=batches, contexts=contexts, tokens=tokens, **rest)


def print_result(result: Measured, *, as_json: bool) -> None:
    """Print the tables, or with `as_json` one document."""
    if as_json:
        print(bench.encode(result).decode())
        return
    console = Console()
    for line in _card(result):
        show_lines(console, wrap(line, width_of(console)))
    if isinstance(result, llm.LanguageBench):
        show(console, _tokens(result))
        show_lines(console, ["", "where a decode step goes, ms"])
        show(console, _budgets(result))
    else:
        show(console, _calls(result))
    show(console, Table((Column(""), Column("", right=True), Column("")), list(map(_memory, result.memory))))


def _card(result: Measured) -> list[str]:
    weights = (
        f"weights {result.weight_bytes / 1e6:.1f} MB, artifact {result.artifact_bytes / 1e6:.1f} MB, "
        f"reads {result.read_bandwidth / 1e9:.1f} GB/s"
    )
    lines = [f"{result.name}  {result.backend} {result.quant}, {result.threads} threads; {weights}"]
    if isinstance(result, llm.LanguageBench):
        size, per_token = formatting.size(result.kv_memory), formatting.size(result.kv_bytes_per_token)
        lines.append(
            f"KV cache {result.kv_dtype}, {per_token} a token; {size} by default: {result.kv_tokens} tokens"
        )
    return lines


def _calls(result: bench.Bench) -> Table:
    against = [f"time ÷ {result.against}", "verdict"] if result.against else []
    heads, rows = ("batch", "p50 ms", "p90 ms", "p99 ms", "rows/s", "floor ms", *against), []
    for row in result.rows:
        times = (f"{1e3 * t:.2f}" for t in (row.latency.p50, row.latency.p90, row.latency.p99))
        cells = [str(row.batch), *times, f"{row.rows_per_second:.1f}", f"{1e3 * row.floor:.2f}"]
        rows.append([*cells, *_pair(row.pair)])
    return _table(heads, rows)


def _tokens(result: llm.LanguageBench) -> Table:
    """Table of first tokens and decode steps.

    Its column `of floor` is the share of a step that reading weights and cache takes at the measured bandwidth.
    """
    heads = [
        "batch",
        "context",
        "first token ms",
        "prefill tok/s",
        "step p50 ms",
        "p90",
        "p99",
        "decode tok/s",
    ]
    against = [f"step ÷ {result.against}", "verdict", "first token ÷"] if result.against else []
    rows = []
    for row in result.rows:
        times = [
            f"{1e3 * t:.2f}" for t in (row.between_tokens.p50, row.between_tokens.p90, row.between_tokens.p99)
        ]
        cells = [str(row.batch), str(row.context), f"{1e3 * row.first_token.p50:.1f}"]
        cells += [f"{row.prefill_per_second:,.0f}", *times, f"{row.decode_per_second:,.1f}"]
        first = [f"{row.first_pair.ratio:.2f}"] if row.first_pair else []
        rows.append([*cells, formatting.of_ceiling(row.of_floor), *_pair(row.pair), *first])
    return _table([*heads, "of floor", *against], rows)


def _budgets(result: llm.LanguageBench) -> Table:
    """Build the table of the parts of a decode step's time.

    Its column `outside` is the share outside of weights, the activations quantized for them, and attention.
    """
    parts = ("weights", "quantizing", "attention", "rows", "waiting", "other", "sampling", "engine")
    rows = []
    for row in result.rows:
        if row.budget is not None:
            times = [f"{1e3 * getattr(row.budget, part):.3f}" for part in parts]
            rows.append([str(row.batch), str(row.context), *times, formatting.share(row.budget.outside)])
    return _table(["batch", "context", *parts, "outside"], rows)


def _pair(pair: Paired | None) -> list[str]:
    return [] if pair is None else [f"{pair.ratio:.2f} [{pair.low:.2f}, {pair.high:.2f}]", pair.verdict]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    return Table([Column(head, right=True) for head in heads], rows)


def _memory(finding: Finding) -> tuple[str, str, str]:
    value = "unknown" if finding.value is None else formatting.number(finding.value, finding.unit)
    return finding.what, value, finding.why
