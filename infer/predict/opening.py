"""What an artifact needs before it runs here: its machine is compared with this one, its graph lowered again."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from .. import artifact, capture, folders
from ..errors import ArtifactError
from ..generate import StepShape
from ..spec import Finding


def generation_shape(manifest: artifact.Manifest) -> StepShape | None:
    """The KV cache of a language model that can generate, else None."""
    found = manifest.meta.get("generation")
    return None if found is None else msgspec.convert(found, StepShape)


def differences(made: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    return [
        f"{key} {made.get(key)} → {here.get(key)}"
        for key in sorted({*made, *here})
        if made.get(key) != here.get(key)
    ]


def lower_again(
    folder: Path,
    manifest: artifact.Manifest,
    backend: Any,
    device: str,
    differs: list[str],
    trust_code: bool,
    notes: list[Finding],
) -> Path:
    """Lower graph.pt2 for this machine into the user's cache; a finished earlier result is used as it is."""
    why = ", ".join(differs)
    if not (folder / capture.PROGRAM).exists():
        raise ArtifactError(
            f"made for another machine ({why}) and it holds no portable graph", where=str(folder)
        )
    if not trust_code:
        artifact.require_trust(folder, "graph.pt2, to lower it again for this machine")
    key = artifact.digest(json.dumps([manifest.files, backend.target(device)], sort_keys=True).encode())
    place = folders.cache("lowered") / key
    notes.append(Finding("open", "lowered again", str(place), why=f"made for another machine: {why}"))
    if place.exists():
        return place
    with tempfile.TemporaryDirectory(dir=place.parent) as work:
        fresh = Path(work) / key
        fresh.mkdir(mode=0o700)
        for name in (capture.SIGNATURE, capture.PROGRAM, "weights"):
            (fresh / name).symlink_to((folder / name).resolve())
        backend.lower(capture.load(folder), manifest.plan, fresh)
        with contextlib.suppress(OSError):  # another process was first: its result is equal
            fresh.rename(place)
    return place
