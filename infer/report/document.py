"""The report as a value: all that was asked, tried, chosen, refused and measured. `report.json` is this."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from .. import device as hardware
from ..artifact import Manifest
from ..fidelity.gate import judge, limit
from ..plan import Plan
from ..printable import plain_values
from ..report_versions import FORMAT, upgrade
from ..results import BackendResult, Metric
from ..spec import Choice, Finding, LayerChoice, TensorSpec
from ..thresholds import Limits, limits, precision
from . import roofline, wording
from .latency import Latency, Paired

MOST_PINS = 8  # on a command line that people read


class Timed(Protocol):
    """What was timed at one batch size: `pair.a` is the artifact, `pair.b` what it was timed against."""

    batch: int
    pair: Paired


class LatencyRow(msgspec.Struct, frozen=True):
    """One batch size. `floor` is the least time possible, in seconds; `of_ceiling` is floor / p50.

    `in_cache`: what a call reads stays in the processor's caches, whose bandwidth the floor takes.
    """

    batch: int
    pair: Paired
    per_second: float
    floor: float | None = None
    of_ceiling: float | None = None
    bound: str = ""
    in_cache: bool = False

    @property
    def ours(self) -> Latency:
        return self.pair.a

    @property
    def baseline(self) -> Latency:
        return self.pair.b


class FidelityRow(msgspec.Struct, frozen=True):
    """One metric; without a `limit` it is shown, not judged. `used` is the share of what the limit allows.

    `what` is the label that people read; code asks for `subject` and `metric`, as `infer.results.Metric` has them.
    """

    what: str
    value: float | int | str | bool | None
    unit: str
    why: str
    subject: str
    metric: str
    limit: float | None = None
    larger_is_worse: bool = True
    used: float | None = None
    ok: bool | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """See the fields; sizes are bytes, times seconds. `headline` is read first, then `verdict`."""

    format: int = FORMAT
    name: str
    made_with: str
    headline: str
    passed: bool
    failure: str = ""
    verdict: tuple[str, ...]
    command: str
    backend: str
    device: str
    task: str
    precision: str
    baseline: str
    plan: Plan
    choices: tuple[Choice, ...]
    tried: tuple[BackendResult, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    fidelity: tuple[FidelityRow, ...]
    latency: tuple[LatencyRow, ...]
    layers: tuple[LayerChoice, ...] = ()
    size: int
    original_size: int | None
    decodes: bool = False  # what was timed is one decode step of `batch` sequences, not a batch of samples
    findings: tuple[Finding, ...]
    versions: dict[str, str]
    machine: dict[str, str]

    def stage(self, name: str) -> tuple[Finding, ...]:
        """The findings of one stage: `memory`, `ceiling`, `load`, …"""
        return tuple(f for f in self.findings if f.stage == name)


def encode(report: Report) -> bytes:
    """Indented JSON; what is unknown is null."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1)


def decode(data: bytes) -> Report:
    """The inverse of `encode`, with nothing in its texts that a terminal would obey; reads what earlier versions of
    `infer` wrote. Raises `msgspec.MsgspecError` for anything else."""
    found = msgspec.json.decode(data, type=dict[str, Any])
    return msgspec.convert(plain_values(upgrade(found)), Report)


def from_manifest(
    manifest: Manifest,
    *,
    fidelity: Sequence[Metric],
    backends: Sequence[BackendResult] = (),
    latency: Sequence[Timed],
    size: int,
    baseline: str = "",
    original_size: int | None = None,
) -> Report:
    """Gather the manifest and the timings; `original_size` defaults to the bytes of the weights loaded."""
    plan, findings = manifest.plan, manifest.findings
    allowed = limits(plan, manifest.task)
    rows = tuple(_latency_row(timed, findings) for timed in latency)
    failure = judge(fidelity, allowed, plan.max_error) or ""
    decodes = "generation" in manifest.meta
    original = original_size if original_size is not None else _loaded_bytes(findings)
    return Report(
        name=manifest.name,
        made_with=manifest.made_with,
        headline=_headline(rows, fidelity, original, size, passed=not failure, decodes=decodes),
        decodes=decodes,
        passed=not failure,
        failure=failure,
        verdict=manifest.verdict,
        command=_command(manifest),
        backend=manifest.backend,
        device=manifest.device,
        task=manifest.task,
        precision=precision(plan),
        baseline=baseline or _against(manifest.verdict),
        plan=plan,
        choices=manifest.choices,
        tried=_ranked(backends),
        inputs=manifest.inputs,
        outputs=manifest.outputs,
        fidelity=tuple(_fidelity_row(metric, plan, allowed, fidelity) for metric in fidelity),
        latency=rows,
        layers=manifest.layers,
        size=size,
        original_size=original,
        findings=findings,
        versions=manifest.versions,
        machine=hardware.fingerprint(manifest.device),
    )


def _command(manifest: Manifest) -> str:
    """As it was asked for; where layers were decided by measurements, the plan that says how."""
    output = f"{manifest.name}.infer"
    measured = any(row.by != "pin" and row.effect for row in manifest.layers)
    moved = any(
        row.by in ("budget", "speed", "sensitivity") and row.format not in ("float", manifest.plan.quant)
        for row in manifest.layers
    )
    pins = {row.name: row.format for row in manifest.layers if row.by == "pin"}
    if measured or moved or len(pins) > MOST_PINS:
        return wording.again(manifest.plan, output)
    return wording.command(manifest.plan.with_(layers=pins), output)


def _headline(
    rows: Sequence[LatencyRow],
    fidelity: Sequence[Metric],
    original: int | None,
    size: int,
    *,
    passed: bool,
    decodes: bool = False,
) -> str:
    speed = wording.speeds([(row.batch, row.pair) for row in rows]) if rows else None
    parts = [
        f"decoding {speed}" if speed and decodes else speed,
        wording.smaller(original, size),
        wording.faithful(fidelity),
        "passed" if passed else "failed",
    ]
    return " · ".join(part for part in parts if part)


def _latency_row(timed: Timed, findings: Sequence[Finding]) -> LatencyRow:
    per_second = timed.batch / max(timed.pair.a.p50, 1e-12)
    least = roofline.floors(findings).get(timed.batch)
    if least is None or not isinstance(least.value, int | float):
        return LatencyRow(timed.batch, timed.pair, per_second)
    floor = float(least.value)
    bound = least.why.partition("-bound")[0]
    in_cache = bound == "memory" and roofline.IN_CACHE_WORDS in least.why
    return LatencyRow(timed.batch, timed.pair, per_second, floor, floor / timed.pair.a.p50, bound, in_cache)


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
    """The chosen one first, then those that ran by their time, then those that refused."""
    order = {"chosen": 0, "tried": 1, "refused": 2}
    return tuple(sorted(backends, key=lambda row: (order[row.outcome], row.seconds or 0.0, row.name)))


def _loaded_bytes(findings: Sequence[Finding]) -> int | None:
    """The weights as the source stored them, as the load stage found them."""
    for finding in findings:
        known = isinstance(finding.value, int | float) and finding.unit in ("MB", "B")
        if finding.stage == "load" and finding.what == "weights" and known:
            return int(float(finding.value or 0) * (1e6 if finding.unit == "MB" else 1))
    return None


def _against(verdict: Sequence[str]) -> str:
    found = (line.rpartition(" against ")[2] for line in verdict if " against " in line)
    return next(found, "the unquantized model")
