"""Report of a run, built from its manifest and its measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from .. import device as hardware
from ..artifact.store import Manifest
from ..fidelity.gate import judge, limit
from ..fidelity.thresholds import Limits, limits, precision
from ..latency import Timing
from ..plan import Plan
from ..results import BackendResult, Metric
from .document import CacheSize, FidelityRow, LatencyRow, Report
from .measurements.memory import Memory
from .measurements.roofline import MachineRoofline
from .measurements.step_breakdown import StepBreakdown
from .rendering import formatting

MOST_PINS = 8  # on a command line that people read


@dataclass(frozen=True, kw_only=True)
class Results:
    """Measurements of a run: the contents of a report besides the manifest."""

    fidelity: Sequence[Metric]
    latency: Sequence[Timing]
    size: int  # bytes of the artifact
    baseline: str = ""  # what it was timed against
    backends: Sequence[BackendResult] = ()
    limitations: Sequence[str] = ()  # sentences of the verdict on what the artifact can't do
    quantized: str = ""  # for display: the share of the weights that is quantized
    rows_size: int = 0  # bytes of the rows that it is checked with, which `size` leaves out
    original_size: int | None = None  # bytes of the weights as the source stores them
    ceiling: MachineRoofline | None = None
    memory: Memory | None = None
    steps: Sequence[StepBreakdown] = ()
    cache: CacheSize | None = None


def build_report(manifest: Manifest, results: Results) -> Report:
    """Build the report of a run from its plan and decisions, in the manifest, and its measurements."""
    plan = manifest.plan
    allowed = limits(plan, manifest.task)
    rows = tuple(_latency_row(timed, results.ceiling) for timed in results.latency)
    failure = judge(results.fidelity, allowed, plan.max_error) or ""
    decodes = "generation" in manifest.meta
    return Report(
        name=manifest.name,
        made_with=manifest.made_with,
        headline=_headline(rows, results, passed=not failure, decodes=decodes),
        decodes=decodes,
        passed=not failure,
        failure=failure,
        verdict=manifest.verdict,
        limitations=tuple(results.limitations),
        command=_command(manifest),
        backend=manifest.backend,
        device=manifest.device,
        task=manifest.task,
        precision=precision(plan),
        baseline=results.baseline or "the unquantized model",
        plan=plan,
        choices=manifest.choices,
        tried=_ranked(results.backends),
        inputs=manifest.inputs,
        outputs=manifest.outputs,
        fidelity=tuple(_fidelity_row(metric, plan, allowed, results.fidelity) for metric in results.fidelity),
        latency=rows,
        layers=manifest.layers,
        quantized=results.quantized,
        size=results.size,
        rows_size=results.rows_size,
        original_size=results.original_size,
        ceiling=results.ceiling,
        memory=results.memory,
        steps=tuple(results.steps),
        cache=results.cache,
        findings=manifest.findings,
        versions=manifest.versions,
        machine=hardware.fingerprint(manifest.plan.device),
    )


def _command(manifest: Manifest) -> str:
    """Return the command that makes the artifact again, with the formats that measurements chose pinned."""
    output = f"{manifest.name}.infer"
    measured = any(row.by != "pin" and row.effect for row in manifest.layers)
    moved = any(
        row.by in ("budget", "speed", "sensitivity") and row.format not in ("float", manifest.plan.quant)
        for row in manifest.layers
    )
    pins = {row.name: row.format for row in manifest.layers if row.by == "pin"}
    if measured or moved or len(pins) > MOST_PINS:
        return formatting.repeat_command(manifest.plan, output)
    return formatting.command(manifest.plan.with_(layers=pins), output)


def _headline(rows: Sequence[LatencyRow], results: Results, *, passed: bool, decodes: bool) -> str:
    speed = formatting.speeds([(row.batch, row.pair) for row in rows]) if rows else None
    parts = [
        f"decoding {speed}" if speed and decodes else speed,
        formatting.smaller(results.original_size, results.size),
        formatting.faithful(results.fidelity),
        "passed" if passed else "failed",
    ]
    return " · ".join(part for part in parts if part)


def _latency_row(timed: Timing, ceiling: MachineRoofline | None) -> LatencyRow:
    p50 = timed.pair.a.p50
    per_second = timed.batch / max(p50, 1e-12)
    least = ceiling.floor(timed.batch) if ceiling is not None else None
    row = LatencyRow(timed.batch, timed.pair, per_second, lengths=timed.lengths)
    if least is None:
        return row
    return msgspec.structs.replace(
        row,
        floor=least.seconds,
        of_ceiling=least.seconds / p50,
        bound=least.bound,
        in_cache=least.in_cache,
    )


def _fidelity_row(metric: Metric, plan: Plan, allowed: Limits, fidelity: Sequence[Metric]) -> FidelityRow:
    base = FidelityRow(metric.label, metric.value, metric.unit, metric.detail, metric.subject, metric.name)
    judged, value = limit(metric.name, allowed, plan.max_error), metric.number
    if judged is None or value is None:
        return base
    bound, larger_is_worse = judged
    room = bound if larger_is_worse else 1 - bound
    spent = max(0.0, value if larger_is_worse else 1 - value)
    counts = [other for other in fidelity if other.subject == metric.subject and other.name == "rows"]
    return msgspec.structs.replace(
        base,
        limit=bound,
        larger_is_worse=larger_is_worse,
        used=spent / room if room > 0 else None,
        ok=judge([metric, *counts], allowed, plan.max_error) is None,
    )


def _ranked(backends: Sequence[BackendResult]) -> tuple[BackendResult, ...]:
    """Sort trials: the chosen one, then those that ran by their time, then those that refused."""
    order = {"chosen": 0, "tried": 1, "skipped": 2, "refused": 3}
    return tuple(sorted(backends, key=lambda row: (order[row.outcome], row.seconds or 0.0, row.name)))
