"""Summaries for display that run no model: inspect, verify, doctor, report."""

from __future__ import annotations

import time
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import msgspec
import torch
from packaging.requirements import Requirement

from .. import device as hardware
from .. import hub, load, plugins
from ..artifact import golden, store
from ..artifact.manifest import MAX_BYTES, REPORT
from ..distribution import DISTRIBUTION
from ..errors import ArtifactError
from ..kernels import cpu
from ..llm.text.text_side import TextSide
from ..predict.predictor import Predictor
from ..regular_files import read_regular
from ..spec import UNBOUNDED, Finding
from . import document


def inspect(path: Path) -> dict[str, Any]:
    """Describe an artifact by its manifest, a source file by its headers alone, or a name of the Hub by its files."""
    if (path / store.MANIFEST).exists():
        manifest = store.read_manifest(path)
        return {
            "kind": "artifact",
            "name": manifest.name,
            "backend": manifest.backend,
            "quant": manifest.plan.quant,
            "dtype": manifest.plan.dtype,
            "task": manifest.task,
            "inputs": [str(spec) for spec in manifest.inputs],
            "outputs": [str(spec) for spec in manifest.outputs],
            "sizes": {
                name: f"{low}…{high if high < UNBOUNDED else ''}"
                for name, (low, high) in manifest.sizes.items()
            },
            "data": golden.stored_user_data(path, manifest),
            "bytes": store.size(path),
            "files": len(manifest.files),
            "signed by this user": store.signed_here(path),
            "made with": manifest.made_with,
            **_forms(path),
            "verdict": list(manifest.verdict),
        }
    if name := hub.named(str(path)):
        return hub.describe(name)
    source = load.identify(path)
    return {"kind": source.kind, "says": source.says, "holds code": source.code}


def _forms(path: Path) -> dict[str, str]:
    """Describe how a language model with a chat template writes calls and thoughts, and what shows that."""
    text = TextSide(path, path.name, 0)
    if text.template is None:
        return {}
    chosen = text.forms
    return {
        "tool form": f"{chosen.name}: {chosen.why}",
        "reasoning form": f"{chosen.thought_name}: {chosen.thought_why}",
    }


def verify(path: Path, *, trust_code: bool = False) -> dict[str, Any]:
    """Check hashes, signature and golden inputs; raise `ArtifactError` at the first fault."""
    manifest = store.read_manifest(path)
    start = time.perf_counter()
    store.verify(path, manifest)
    hashed = time.perf_counter()
    with Predictor.load(path, trust_code=trust_code) as predictor:
        notes = [f"{note.what}: {note.why}" for note in predictor.notes]
    return {
        "files": f"{len(manifest.files)} match their sha256 ({hashed - start:.2f} s)",
        "signature": "this user's" if store.signed_here(path) else "not this user's",
        "golden inputs": f"pass ({time.perf_counter() - hashed:.2f} s to open and run)",
        "notes": notes,
    }


def report(path: Path) -> document.Report:
    store.read_manifest(path)
    try:
        data = read_regular(path / REPORT, MAX_BYTES, follow_links=False, error=ArtifactError)
        return document.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ArtifactError(f"the report can't be read: {error}", where=str(path)) from error


def doctor() -> list[Finding]:
    """List one finding per backend, format and device: usable on this machine, or the reason why not."""
    machine = hardware.fingerprint("cpu")
    rows = [Finding("machine", key, value) for key, value in machine.items()]
    rows.append(Finding("machine", "memory available", hardware.memory_available("cpu") / 2**30, "GiB"))
    rows.append(
        Finding("machine", "CUDA device", _cuda(), why="" if torch.cuda.is_available() else "CPU only")
    )
    reason = hardware.why_no_amx()
    rows.append(Finding("machine", "AMX", "no" if reason else "yes", why=reason or ""))
    reason = cpu.why_not()
    rows.append(Finding("machine", "native kernels", "no" if reason else cpu.isa(), why=reason or ""))
    rows += [row for name in plugins.names("backends") for row in _details(name)]
    for folder, kind in (("backends", "backend"), ("infer.compress.formats", "quantizer")):
        for name in plugins.names(folder):
            reason = plugins.why_not(folder, name)
            rows.append(Finding(kind, name, "no" if reason else "yes", why=reason or ""))
    rows += [Finding("version", name, value) for name, value in hardware.versions().items()]
    return rows + _conflicts()


def _details(backend: str) -> list[Finding]:
    """Return what a backend says of itself besides whether it can run: its `doctor()`."""
    details: list[Finding] = getattr(plugins.get("backends", backend), "doctor", list)()
    return details


def _cuda() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def _conflicts() -> list[Finding]:
    """List installed packages outside infer's version bounds, with the pip command that fixes them."""
    conflicts = []
    try:
        wanted = [Requirement(text) for text in requires(DISTRIBUTION) or []]
    except PackageNotFoundError:
        return []
    for requirement in wanted:
        try:
            have = version(requirement.name)
        except PackageNotFoundError:
            continue
        if not requirement.specifier.contains(have, prereleases=True):
            bare = f"{requirement.name}{requirement.specifier}"
            conflicts.append(Finding("conflict", requirement.name, have, why=f"pip install '{bare}'"))
    return conflicts
