"""`infer bench`: latency percentiles, throughput, memory and the floor of an artifact, alone or against another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from .. import device as hardware
from .. import fidelity, load
from ..artifact import store
from ..artifact.golden import read_inputs
from ..errors import GateError, UsageError
from ..fidelity.thresholds import LIMITS, precision_class
from ..graph.typical_inputs import typical_inputs
from ..latency import Latency, Paired, measure, paired
from ..plan import Plan
from ..predict.predictor import Predictor
from ..report.measurements import memory
from ..report.measurements import profile as profiler
from ..run import float_graph
from ..spec import Finding

Call = Callable[[], object]


class Row(msgspec.Struct, kw_only=True):
    """One batch size. Times in seconds; `floor` is what the weights' bytes cost at the measured read bandwidth."""

    batch: int
    latency: Latency
    rows_per_second: float
    floor: float
    pair: Paired | None = None


class Bench(msgspec.Struct, kw_only=True):
    """Result of one run of `infer bench`; it is also the JSON document."""

    name: str
    backend: str
    quant: str
    against: str
    weight_bytes: int
    artifact_bytes: int
    read_bandwidth: float
    threads: int
    rows: list[Row]
    memory: list[Finding]
    versions: dict[str, str]
    machine: dict[str, str]


def run(
    path: Path,
    *,
    vs: Path | None = None,
    batches: Sequence[int] = (1, 8),
    seconds: float = 1.0,
    threads: int | None = None,
    trust_code: bool = False,
) -> Bench:
    """Time `path` on its golden inputs, repeated to each batch size; interleaved with `vs`, an artifact or a source.

    Before anything is timed the outputs of both are compared; an answer outside the limits is a `GateError`.
    """
    with Predictor.load(path, threads=threads, trust_code=trust_code) as ours:
        if too_large := [b for b in batches if b > ours.max_batch]:
            raise UsageError(f"batch {too_large[0]} is more than the {ours.max_batch} that {ours.name} takes")
        golden = read_inputs(path, ours.inputs)
        other, label = _other(vs, ours, trust_code) if vs else (None, "")
        if other is not None:
            check_equal_outputs(ours, other, golden, label)
        manifest = ours.manifest
        weight_bytes = sum(memory.stored_weights(path).values()) or store.size(path)
        bandwidth = hardware.bandwidth_for(weight_bytes, manifest.device)
        rows = []
        for batch in batches:
            inputs = typical_inputs(ours.inputs, golden, ours.sizes, batch)
            rows.append(_row(ours, other, inputs, batch, weight_bytes / bandwidth, seconds))
        return Bench(
            name=ours.name,
            backend=manifest.backend,
            quant=manifest.plan.quant,
            against=label,
            weight_bytes=weight_bytes,
            artifact_bytes=store.size(path),
            read_bandwidth=bandwidth,
            threads=torch.get_num_threads(),
            rows=rows,
            memory=memory.probe(manifest.backend, path, manifest.device).findings(),
            versions=hardware.versions(),
            machine=hardware.fingerprint(manifest.device),
        )


def _row(
    ours: Predictor, other: Any, inputs: dict[str, Tensor], batch: int, least: float, seconds: float
) -> Row:
    call: Call = lambda: ours.predict(inputs)  # noqa: E731
    if other is None:
        taken = measure(call, min_seconds=seconds)
        return Row(batch=batch, latency=taken, rows_per_second=batch / taken.p50, floor=least)
    pair = paired(call, lambda: other(inputs), max_seconds=2 * seconds)
    return Row(batch=batch, latency=pair.a, rows_per_second=batch / pair.a.p50, floor=least, pair=pair)


def _other(vs: Path, ours: Predictor, trust_code: bool) -> tuple[Callable[[dict[str, Tensor]], Any], str]:
    """Open another artifact, or a source as its float original in plain torch."""
    if (vs / store.MANIFEST).exists():
        predictor = Predictor.load(vs, trust_code=trust_code)
        if [s.format() for s in predictor.inputs] != [s.format() for s in ours.inputs]:
            raise UsageError(f"{vs} takes other inputs: {', '.join(map(str, predictor.inputs))}")
        return predictor.predict, predictor.name
    plan = ours.manifest.plan.with_(source=str(vs), quant="none", dtype="float32", trust_code=trust_code)
    loaded = load.load(plan)
    load.fill(loaded)
    return float_graph.float_graph(loaded).run, f"{vs.name}, float in torch"


def check_equal_outputs(
    ours: Predictor, other: Callable[..., Any], inputs: dict[str, Tensor], label: str
) -> None:
    plan: Plan = ours.manifest.plan
    metrics = fidelity.compare(other(inputs), ours.predict(inputs), task="tensors")
    classes = [precision_class(plan.quant, plan.dtype), "4bit"]
    loosest = max((LIMITS[name] for name in classes), key=lambda limits: limits.relative_error or 0.0)
    if reason := fidelity.judge(metrics, loosest, None):
        raise GateError(f"the answers differ too much from {label} to compare speeds: {reason}")


def profile(path: Path, output: Path, *, trust_code: bool = False) -> list[profiler.Op]:
    """Trace one call on the golden inputs with the profiler; return the operators that took longest."""
    with Predictor.load(path, trust_code=trust_code) as predictor:
        inputs = read_inputs(path, predictor.inputs)
        return profiler.trace(lambda: predictor.predict(inputs), output, device=predictor.manifest.device)


def encode(result: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(result), indent=1)
