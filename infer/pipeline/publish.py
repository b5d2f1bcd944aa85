"""From the trial that was chosen to the folder that people open: compiled form, golden inputs, report, manifest."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec
from safetensors.torch import save_file

from .. import __version__, load, plugins
from .. import device as hardware
from ..artifact import golden, store
from ..compress import assign
from ..graph import capture
from ..report import document, html, memory, roofline
from .run import Street
from .trial import Trial


@dataclass
class Outcome:
    """Result of `optimize`: the path of the artifact, its manifest and the report."""

    path: Path
    manifest: store.Manifest
    report: document.Report


def publish(
    street: Street,
    loaded: load.LoadedModel,
    original: capture.Graph,
    best: Trial,
    mix: assign.Mix,
    ceiling: roofline.Ceiling,
    folder: Path,
    output: Path,
) -> Outcome:
    """Complete the staged `folder` and put it at `output`."""
    street.watch.step("publish", str(output))
    shutil.move(best.folder / "compiled", folder / "compiled") if (
        best.folder / "compiled"
    ).exists() else None
    _adopt(best.folder, folder)
    (folder / "golden").mkdir()
    for name, tensors in best.golden.items():
        save_file(tensors, folder / "golden" / f"{name}.safetensors")
    street.found([golden.finding(street.plan, best.golden, loaded.samples_from)])
    for name, path in loaded.files.items():
        shutil.copyfile(path, folder / name)
    best.close()
    shutil.rmtree(folder / "trials", ignore_errors=True)
    if plugins.get("backends", best.backend).PORTABLE:
        shutil.rmtree(folder / "weights", ignore_errors=True)
        (folder / capture.PROGRAM).unlink(missing_ok=True)
    measured = memory.probe(best.backend, folder, street.plan.device, shape=best.shape)
    street.found(measured.findings())
    manifest = _manifest(street, loaded, original, best, mix, output)
    results = document.Results(
        fidelity=best.fidelity,
        latency=best.latency,
        size=store.size(folder),
        baseline=best.baseline,
        backends=street.backends,
        original_size=loaded.weight_bytes,
        ceiling=ceiling,
        memory=measured,
        steps=best.steps,
        cache=None
        if best.shape is None
        else document.CacheSize(best.shape.kv_dtype, best.shape.bytes_per_token),
    )
    report = document.from_manifest(manifest, results)
    (folder / "report.json").write_bytes(document.encode(report))
    (folder / "report.html").write_text(html.render_html(report))
    return Outcome(output, store.publish(folder, output, manifest), report)


def _adopt(chosen: Path, folder: Path) -> None:
    """The graph that the chosen trial lowered becomes the artifact's, where it is another form than the staged one."""
    for name in (capture.SIGNATURE, capture.PROGRAM, "weights"):
        source, target = (chosen / name).resolve(), folder / name
        if not source.exists() or source == target.resolve():
            continue
        shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
        shutil.move(source, target)


def _manifest(
    street: Street,
    loaded: load.LoadedModel,
    original: capture.Graph,
    best: Trial,
    mix: assign.Mix,
    output: Path,
) -> store.Manifest:
    """The plan in it pins the format of every layer, so that it makes the same artifact again."""
    pins = {layer.name: layer.format for layer in mix.layers}
    backend = plugins.get("backends", best.backend)
    share = best.quantized or mix.quantized
    meta = dict(loaded.meta)
    if best.shape is not None:
        meta["generation"] = msgspec.to_builtins(best.shape)
    return store.Manifest(
        name=output.name.removesuffix(".infer"),
        made_with=f"infer {__version__}",
        plan=street.plan.with_(layers=pins),
        choices=tuple(street.choices),
        backend=best.backend,
        device=street.plan.device,
        task=original.task,
        inputs=original.inputs,
        outputs=original.outputs,
        sizes=dict(original.sizes),
        target=backend.target(street.plan.device),
        versions=hardware.versions(),
        meta=meta,
        verdict=(*best.verdicts(street.plan), *([share] if share else [])),
        findings=tuple(street.findings),
        layers=mix.layers,
        samples_from=loaded.samples_from,
        scores_only=best.scores_only,
    )
