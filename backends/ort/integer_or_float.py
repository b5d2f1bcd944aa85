"""Form of quantized layers in ONNX Runtime: integer products or weights decoded once, by measurement.

Both are packed in the file. Integer products are MatMulNBits in 8-bit blocks for table formats, MatMulInteger and
QLinearConv for int8.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from infer import latency
from infer.coverage import Coverage
from infer.graph.program import Graph, OnnxGraph
from infer.graph.typical_inputs import typical_inputs
from infer.onnx.layers.operands import Weights
from infer.onnx.ort_session import OrtRunner
from infer.onnx.rewrite import RewriteResult
from infer.plan import Plan
from infer.spec import Finding

from .layers import integer_layers, table_layers

PAIRS = 100  # of turns, of short calls
UNDECIDED = 0.7  # seconds of pairs, after which either form will do
MAX_DIFFERENCE = 0.03  # relative difference of the outputs of 8-bit blocks from those of decoded weights
INTEGER = "integer products"
PRODUCTS, FLOAT = "products", "float"  # option of the backend, and its value that never takes integers
# Of a program there is no coverage: its layers were quantized before.
Written = tuple[RewriteResult, Coverage | None]


def choose(
    graph: Graph,
    plan: Plan,
    path: Path,
    write: Callable[[Path, Weights], Written],
    *,
    is_decode_step: bool = False,
) -> tuple[Written, list[Finding]]:
    """Write a quantized model in its faster form to `path`; return what was written, and findings on the choice.

    `write` writes one form. A decode step has integer products, and a device other than the CPU decoded weights: these
    are not measured. The option `products` asks for decoded ones.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    weights_only = plan.quant == "int8:weight" and isinstance(
        graph, OnnxGraph
    )  # of programs: the layers themselves
    if plan.device != "cpu" or weights_only or plan.backend_options.get(PRODUCTS) == FLOAT:
        return write(path, "float"), []
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        integers, floats = (Path(work) / name / path.name for name in ("integers", "floats"))
        integers.parent.mkdir()
        chosen, written, findings = integers, write(integers, "blocks"), list[Finding]()
        integer = integer_layers(written[0])
        if integer and is_decode_step:
            why = "a decode step reads each weight once: a quarter of the bytes of float32"
            findings = [_finding(INTEGER, why)]
        elif integer:
            floats.parent.mkdir()
            decoded = write(floats, "float")
            has_tables = table_layers.BLOCKS in written[0].forms  # int8 has limits of its own
            most = MAX_DIFFERENCE if has_tables else math.inf
            use_integers, finding = _compare(graph, plan, integers, floats, most)
            findings = [finding]
            if not use_integers:
                chosen, written = floats, decoded
        for file in chosen.parent.iterdir():
            file.replace(path.parent / file.name)
    return written, findings


def _compare(graph: Graph, plan: Plan, integers: Path, floats: Path, most: float) -> tuple[bool, Finding]:
    """Compare integer products with decoded weights on the samples; return whether they are faster beyond noise, slower
    at no batch size, and the outputs differ by at most `most`, with the figures.

    Decoded weights take the time of the float model and lose less, so that a tie goes to them; a plan without batch
    sizes, which are not timed, takes integers.
    """
    a, b = (OrtRunner(path, graph.inputs, graph.outputs, plan.device) for path in (integers, floats))
    pairs, loss, words = list[latency.Paired](), 0.0, []
    for batch in plan.batches:
        inputs = typical_inputs(graph.inputs, graph.samples, graph.sizes, batch)
        loss = max(loss, _difference(a.run(inputs), b.run(inputs)))
        ours, theirs = (partial(runner.run, inputs) for runner in (a, b))
        pair = latency.paired(ours, theirs, max_seconds=UNDECIDED, max_pairs=PAIRS)
        pairs.append(pair)
        words.append(f"{pair.ratio:.2f} times the time at batch {batch}")
    a.close()
    b.close()
    faster = not pairs or math.prod(pair.ratio for pair in pairs) < latency.FASTER ** len(pairs)
    use_integers = faster and all(pair.verdict != "slower" for pair in pairs) and loss <= most
    form = INTEGER if use_integers else "float32, decoded when the session is created"
    why = f"{INTEGER} take {', '.join(words)} of decoded weights, and change the outputs by {loss:.4f}"
    return use_integers, _finding(form, why)


def _difference(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Return the largest relative difference over outputs; infinite where only one side is finite."""
    errors = [
        float((got[n].double() - w.double()).norm() / w.double().norm().clamp_min(1e-30))
        for n, w in want.items()
    ]
    return max(float("inf") if math.isnan(error) else error for error in errors)


def _finding(form: str, why: str) -> Finding:
    return Finding("lower", "ort quantized layers", form, why=why)
