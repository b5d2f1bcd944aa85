"""Form of quantized layers in ONNX Runtime: integer products or weights decoded once, by measurement.

Both are packed in the file. Integer products are MatMulNBits in 8-bit blocks for table formats, MatMulInteger and
QLinearConv for int8.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch

from ... import latency
from ...compress import Coverage
from ...graph.program import Graph
from ...graph.typical_inputs import typical_inputs
from ...plan import Plan
from ...spec import Finding
from .. import export as exporter
from ..layers.int8_operands import Target, Weights
from ..layers.quantized_layers import RewriteResult, choices
from ..source import onnx_source
from . import ort_session

PAIRS = 100  # of turns, of short calls
MAX_DIFFERENCE = 0.03  # relative difference of the outputs of 8-bit blocks from those of decoded weights
TABLES = "linear_lut"
INTEGER = "integer products"
WHAT = "ort quantized layers"
T = TypeVar("T")


def write_program(
    graph: Graph, plan: Plan, path: Path, target: Target, *, is_decode_step: bool
) -> tuple[RewriteResult, list[Finding]]:
    """Write the program as ONNX, its quantized layers in the form chosen; return the rewritten layers and findings.

    A decode step always has integer products, and a device other than the CPU decoded weights: these are not measured.
    """
    model = exporter.to_ir(graph, target)
    layers = set(choices(model))
    if not layers:
        return exporter.write(model, target, path).rewritten, []
    if is_decode_step:
        why = "a decode step reads each weight once: a quarter of the bytes of float32"
        return exporter.write(model, target, path).rewritten, [_finding(INTEGER, why)]
    if plan.device != "cpu" or _decodes(plan):
        return exporter.write(model, target, path, weights="float").rewritten, []
    most = MAX_DIFFERENCE if TABLES in layers else math.inf  # int8 has limits of its own

    def write(to: Path, weights: Weights) -> RewriteResult:
        return exporter.write(model.clone(), target, to, weights=weights).rewritten

    return _faster(graph, plan, path, write, lambda done: done, most)


def write_source(
    graph: Graph, plan: Plan, path: Path, target: Target, ranges: Mapping[str, float] | None
) -> tuple[RewriteResult, Coverage, list[Finding]]:
    """Write an ONNX source quantized to int8, as `write_program` does a program."""
    source = graph.onnx
    if source is None:
        raise ValueError("expected the graph of an ONNX source, got a program")

    def write(to: Path, weights: Weights) -> tuple[RewriteResult, Coverage]:
        to.parent.mkdir(parents=True, exist_ok=True)
        return onnx_source.quantize(source, to, target, weights=weights, ranges=ranges)

    if plan.device != "cpu" or _decodes(plan):
        return *write(path, "float" if _decodes(plan) else "blocks"), []
    (done, coverage), findings = _faster(graph, plan, path, write, lambda made: made[0], math.inf)
    return done, coverage, findings


def _decodes(plan: Plan) -> bool:
    return plan.backend_options.get("products") == "float"


def _faster(
    graph: Graph,
    plan: Plan,
    path: Path,
    write: Callable[[Path, Weights], T],
    rewritten: Callable[[T], RewriteResult],
    most: float,
) -> tuple[T, list[Finding]]:
    """Write both forms, and move the faster one to `path`; the first one where they are the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        blocks, floats = Path(work) / "blocks" / path.name, Path(work) / "float" / path.name
        done, findings = {blocks: write(blocks, "blocks"), floats: write(floats, "float")}, []
        chosen = blocks
        if rewritten(done[blocks]) != rewritten(done[floats]):
            use_blocks, finding = _compare(graph, plan, blocks, floats, most)
            chosen, findings = blocks if use_blocks else floats, [finding]
        for file in chosen.parent.iterdir():
            file.replace(path.parent / file.name)
    return done[chosen], findings


def _compare(graph: Graph, plan: Plan, blocks: Path, floats: Path, most: float) -> tuple[bool, Finding]:
    """Compare integer products with decoded weights on the samples; return whether they are faster, and the outputs
    differ by at most `most`, with the figures.
    """
    a, b = (
        ort_session.OrtRunner(path, graph.inputs, graph.outputs, plan.device) for path in (blocks, floats)
    )
    seconds, loss, words = [0.0, 0.0], 0.0, []
    for batch in plan.batches:
        inputs = typical_inputs(graph.inputs, graph.samples, graph.sizes, batch)
        loss = max(loss, _difference(a.run(inputs), b.run(inputs)))
        pair = latency.paired(lambda: a.run(inputs), lambda: b.run(inputs), max_seconds=2.0, max_pairs=PAIRS)  # noqa: B023
        seconds = [seconds[0] + pair.a.p50, seconds[1] + pair.b.p50]
        words.append(f"{pair.ratio:.2f} times the time at batch {batch}")
    a.close()
    b.close()
    use_blocks = seconds[0] <= seconds[1] and loss <= most
    form = INTEGER if use_blocks else "float32, decoded when the session is created"
    why = f"{INTEGER} take {', '.join(words)} of decoded weights, and change the outputs by {loss:.4f}"
    return use_blocks, _finding(form, why)


def _difference(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Return the largest relative difference over outputs; infinite where only one side is finite."""
    errors = [
        float((got[n].double() - w.double()).norm() / w.double().norm().clamp_min(1e-30))
        for n, w in want.items()
    ]
    return max(float("inf") if math.isnan(error) else error for error in errors)


def _finding(form: str, why: str) -> Finding:
    return Finding("lower", WHAT, form, why=why)
