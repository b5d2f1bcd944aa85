"""Publication of the chosen trial as an artifact: compiled form, golden inputs, report, manifest."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from safetensors.torch import save_file
from torch import Tensor

from .. import __version__, carried_state, plugins
from .. import device as hardware
from ..artifact import golden, store
from ..artifact.manifest import target_of
from ..graph import storage
from ..llm.step.step_shape import StepShape
from ..report import build, document
from ..report.measurements import roofline
from ..report.measurements.memory import Memory
from ..report.rendering import html
from ..reporter import Reporter
from ..spec import Finding
from .float_graph import Original
from .resolve_plan import Resolved
from .select import Selected
from .trial import Trial
from .try_backends import Compressed


@dataclass
class Outcome:
    """Result of `optimize`: the path of the artifact, its manifest and the report."""

    path: Path
    manifest: store.Manifest
    report: document.Report


def publish(
    run: Resolved,
    original: Original,
    small: Compressed,
    selected: Selected,
    ceiling: roofline.MachineRoofline,
    folder: Path,
    output: Path,
    reporter: Reporter,
    measure_memory: Callable[..., Memory],
) -> Outcome:
    """Complete the staged `folder` and publish it at `output`; `measure_memory` is called as `memory.probe` is."""
    loaded, best = original.loaded, selected.trial
    reporter.step("publish", str(output))
    _stage_trial(best, folder)
    _write_golden(best.golden, folder / "golden")
    reporter.found([golden.finding(run.plan, best.golden, loaded.samples_from)])
    for name, path in loaded.files.items():
        shutil.copyfile(path, folder / name)
    best.close()
    shutil.rmtree(folder / "trials", ignore_errors=True)
    if plugins.get("backends", best.backend).PORTABLE:
        shutil.rmtree(folder / "weights", ignore_errors=True)
        (folder / storage.PROGRAM).unlink(missing_ok=True)
    measured = (
        Memory(failure="built ahead of time: memory is measured on its GPU")
        if plugins.ahead_of_time(plugins.get("backends", best.backend))
        else measure_memory(best.backend, folder, run.plan.device, shape=best.shape)
    )
    reporter.found(measured.findings())
    manifest = _manifest(run, original, small, selected, reporter.findings, output)
    rows_size = store.size(folder / "golden")
    results = build.Results(
        fidelity=best.fidelity,
        latency=best.latency,
        size=store.size(folder) - rows_size + len(store.as_text(manifest)),
        rows_size=rows_size,
        baseline=best.baseline,
        backends=selected.backends,
        limitations=[*best.limitations(run.plan), *original.limitations],
        quantized=best.quantized or small.quantized,
        original_size=loaded.weight_bytes,
        ceiling=ceiling,
        memory=measured,
        steps=best.steps,
        cache=_cache_size(best.shape),
    )
    report = build.build_report(manifest, results)
    (folder / "report.json").write_bytes(document.encode(report))
    (folder / "report.html").write_text(html.render_html(report))
    return Outcome(output, store.publish(folder, output, manifest), report)


def _write_golden(tensors_by_name: Mapping[str, dict[str, Tensor]], folder: Path) -> None:
    folder.mkdir()
    for name, tensors in tensors_by_name.items():
        save_file(tensors, folder / f"{name}.safetensors")


def _cache_size(shape: StepShape | None) -> document.CacheSize | None:
    if shape is None:
        return None
    return document.CacheSize(shape.kv_dtype, shape.bytes_per_token, shape.page, shape.state_bytes)


def _stage_trial(chosen: Trial, folder: Path) -> None:
    """Move the compiled form of the chosen trial to the staged folder, and its graph where that is another form."""
    if chosen.shape is None or chosen.shape.source is None:
        shutil.rmtree(folder / storage.ENCODER, ignore_errors=True)  # of a step that was not chosen
    for part in ("compiled", f"{storage.ENCODER}/compiled"):
        if (chosen.folder / part).exists():
            shutil.move(chosen.folder / part, folder / part)
    for name in (storage.SIGNATURE, storage.PROGRAM, "weights"):
        source, target = (chosen.folder / name).resolve(), folder / name
        if not source.exists() or source == target.resolve():
            continue
        shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
        shutil.move(source, target)


def _manifest(
    run: Resolved,
    original: Original,
    small: Compressed,
    selected: Selected,
    findings: Sequence[Finding],
    output: Path,
) -> store.Manifest:
    """Make the manifest; its plan pins the format of every layer, so that it makes the same artifact again."""
    best, graph, loaded = selected.trial, original.graph, original.loaded
    pins = {layer.name: layer.format for layer in small.layers}
    plan = run.plan.with_(backend=best.backend, backend_options=dict(best.backend_options), layers=pins)
    backend = plugins.get("backends", best.backend)
    share = best.quantized or small.quantized
    states = {} if best.shape else carried_state.states(graph.inputs, graph.outputs)
    meta = dict(loaded.meta)
    if best.shape is not None:
        meta["generation"] = msgspec.to_builtins(best.shape)
    return store.Manifest(
        name=output.name.removesuffix(".infer"),
        made_with=f"infer {__version__}",
        plan=plan,
        choices=(*run.choices, selected.choice),
        backend=best.backend,
        device="cuda" if plan.device == "cpu" and plugins.ahead_of_time(backend) else plan.device,
        task=graph.task,
        inputs=graph.inputs,
        outputs=graph.outputs,
        sizes=dict(graph.sizes),
        multiples=dict(graph.multiples),
        target=target_of(backend, best.backend, plan.device),
        versions=hardware.versions(),
        meta=meta,
        verdict=(*best.verdicts(plan, original.limitations), *([share] if share else [])),
        findings=tuple(findings),
        layers=small.layers,
        samples_from=loaded.samples_from,
        scores_only=best.scores_only,
        joins=best.joining.joins,
        states=states,
    )
