"""Artifact manifest (manifest.json): parsed strictly and checked before any other file is opened."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ArtifactError, NotUsableError
from ..plan import Plan
from ..regular_files import read_regular
from ..results import ScoresOnly
from ..sanitize import sanitize_values
from ..spec import NAMES, Choice, Finding, Joins, LayerChoice, TensorSpec

BESIDE = "model.infer"  # an artifact in a folder that another library wrote: configuration and tokenizer lie beside it
FORMAT = 4  # the only one that is read: others lack what decides
MANIFEST = "manifest.json"
REPORT = "report.json"
MAX_BYTES, MAX_NAME = 1 << 27, 255
MAX_SIZE = 1 << 48  # of a dimension, and of the elements of one tensor


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of an artifact: all but tensors.

    `plan` makes it again; `files` is path → sha256, `lengths` path → bytes. `joins`: which requests may share a batch,
    as tried on the original and on the optimized form. `states`: see `carried_state`.
    """

    format: int = FORMAT
    name: str
    version: str = "1"
    made_with: str
    plan: Plan
    choices: tuple[Choice, ...]
    backend: str
    device: str
    task: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    sizes: dict[str, tuple[int, int]]
    multiples: dict[str, int] = {}  # symbolic size → what divides it
    target: dict[str, str]
    versions: dict[str, str]
    meta: dict[str, Any]
    verdict: tuple[str, ...]
    findings: tuple[Finding, ...]
    layers: tuple[LayerChoice, ...] = ()
    samples_from: str = ""  # whose rows judged it, and are its golden inputs
    scores_only: ScoresOnly | None = None  # of a language model that does not generate
    joins: Joins = "padded"
    states: dict[str, str] = {}  # input → output of the call before, which a session carries to it
    files: dict[str, str] = {}
    lengths: dict[str, int] = {}


def target_of(backend: Any, name: str, device: str) -> dict[str, str]:
    """Return the properties of this machine that a backend's compiled result depends on, as strings by name.

    Raises `NotUsableError` for a plug-in that returns anything but texts by name.
    """
    found = backend.target(device)
    if not isinstance(found, Mapping) or not all(isinstance(x, str) for pair in found.items() for x in pair):
        raise NotUsableError(
            f"expected a dict of texts from target(), got {found!r:.200}", where=f"backend {name}"
        )
    return {str(key): str(value) for key, value in found.items()}


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest alone: nothing is hashed, nothing runs."""
    path = folder / MANIFEST
    if not folder.is_dir() or not path.exists():
        found = "no such folder" if not folder.exists() else f"no {MANIFEST} in it"
        raise ArtifactError(
            f"not an artifact of infer: {found}", where=str(folder), hint="infer optimize makes one"
        )
    data = read_regular(path, MAX_BYTES, follow_links=False, error=ArtifactError)
    try:
        head = msgspec.json.decode(data, type=dict[str, Any])
        if head.get("format") != FORMAT:
            raise _another_format(sanitize_values(head), path)
        manifest = msgspec.convert(sanitize_values(head), Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ArtifactError(f"the manifest is damaged: {error}", where=str(path)) from error
    if wrong := _wrong(manifest):
        raise ArtifactError(f"the manifest is damaged: {wrong}", where=str(path))
    return manifest


def _another_format(head: dict[str, Any], path: Path) -> ArtifactError:
    plan = head.get("plan")
    source = str(plan.get("source"))[:1000] if isinstance(plan, dict) else "SOURCE"
    again = shlex.join(
        ["infer", "optimize", source, "--plan", str(path), "--output", f"{path.parent.stem}-new.infer"]
    )
    return ArtifactError(
        f"artifact format {str(head.get('format'))[:40]}, this version of infer reads {FORMAT}",
        where=str(path),
        hint=f"Make it again: {again}. Or use the infer that made it ({str(head.get('made_with'))[:80]})",
    )


def read_report(folder: Path) -> dict[str, Any]:
    """Read report.json for display: an object whose findings are rows of `stage` and `what`."""
    path = folder / REPORT
    try:
        found = sanitize_values(msgspec.json.decode(read_bounded(path, MAX_BYTES), type=dict[str, Any]))
        msgspec.convert(found.get("findings", []), list[Finding])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ArtifactError(f"the report is damaged: {error}", where=str(path)) from error
    return found


def read_bounded(path: Path, most: int) -> bytes:
    """Read a regular file of at most `most` bytes; raises `ArtifactError`."""
    return read_regular(path, most, follow_links=False, error=ArtifactError)


def _wrong(manifest: Manifest) -> str | None:
    """Return the reason why a manifest is inconsistent, or None."""
    if not 0 < len(manifest.name) <= MAX_NAME or "/" in manifest.name or not manifest.name.isprintable():
        return "expected a name of printable characters without '/'"
    if not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", manifest.device):
        return f"no device is named {manifest.device[:40]!r}"
    for size, (low, high) in manifest.sizes.items():
        if not 0 <= low <= high <= MAX_SIZE:
            return f"expected sizes of {size!r} as smallest and largest, got {low} and {high}"
    if any(step < 1 for step in manifest.multiples.values()):
        return "expected sizes to be multiples of 1 or more"
    given, returned = ({spec.name: spec for spec in specs} for specs in (manifest.inputs, manifest.outputs))
    for name, source in manifest.states.items():
        if name not in given or source not in returned or len(manifest.states) == len(given):
            return f"expected an input and an output as the state {name[:80]!r}: {source[:80]!r}"
    for specs in (manifest.inputs, manifest.outputs):
        if len({spec.name for spec in specs}) != len(specs):
            return "two inputs or two outputs have the same name"
        if wrong := next((reason for spec in specs if (reason := _wrong_spec(spec))), None):
            return wrong
    return None


def _wrong_spec(spec: TensorSpec) -> str | None:
    if spec.dtype not in NAMES:
        return f"{spec.name!r} is of an unknown dtype {spec.dtype!r}"
    fixed = [size for size in spec.shape if isinstance(size, int)]
    if any(size < 0 for size in fixed) or math.prod(fixed) > MAX_SIZE:
        return f"{spec.name!r} has an impossible shape {list(spec.shape)}"
    return None
