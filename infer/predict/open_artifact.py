"""Opening of an artifact: compare its target with this machine, lower its graph again where they differ."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from .. import library_errors, paths, plugins
from ..artifact import store
from ..artifact.manifest import target_of
from ..errors import ArtifactError, InferError, NotUsableError, UsageError
from ..graph import encoder_decoder_graphs, storage
from ..llm.step.step_shape import StepShape
from ..sanitize import sanitize_text
from ..spec import Finding


def generation_shape(manifest: store.Manifest) -> StepShape | None:
    """Return the sizes of a language model's KV cache; None for a model that can't generate."""
    found = manifest.meta.get("generation")
    return None if found is None else msgspec.convert(found, StepShape)


@contextlib.contextmanager
def as_artifact_error(folder: Path, what: str) -> Iterator[None]:
    """Turn whatever a library raises while it reads an artifact into an `ArtifactError` that names `what`."""
    try:
        yield
    except UsageError as error:  # nothing that the user asked for: names and sizes are the artifact's own
        raise ArtifactError(f"{what}: {error.message}", where=str(folder)) from error
    except (InferError, MemoryError):
        raise
    except Exception as error:
        if refusal := library_errors.as_resource_error(error):
            raise refusal from error
        said = sanitize_text(" ".join(str(error).split()), 400)
        raise ArtifactError(
            f"{what}: {type(error).__name__}: {said}",
            where=str(folder),
            hint="It is damaged, or was made by another version of infer: make it again",
        ) from error


def backend_of(manifest: store.Manifest, folder: Path) -> Any:
    """Return the artifact's backend; raises `ArtifactError` or `NotUsableError`."""
    known = plugins.names("backends")
    if manifest.backend.partition(":")[0] not in known:
        raise ArtifactError(
            f"made for backend {manifest.backend!r}, which this infer does not have ({', '.join(known)})",
            where=str(folder),
        )
    backend = plugins.get("backends", manifest.backend)
    unopenable = getattr(backend, "unopenable", None)
    if unopenable is None and (reason := backend.missing()):
        raise NotUsableError(f"backend {manifest.backend} is not usable on this machine: {reason}")
    if unopenable is not None and (reason := unopenable()):
        raise NotUsableError(f"this artifact can't run here: {reason}", where=str(folder))
    return backend


def differences(made: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    return [
        f"{key} {made.get(key)} → {here.get(key)}"
        for key in sorted({*made, *here})
        if made.get(key) != here.get(key)
    ]


def lower_again(
    folder: Path,
    manifest: store.Manifest,
    backend: Any,
    device: str,
    differs: list[str],
    trust_code: bool,
    notes: list[Finding],
) -> Path:
    """Lower graph.pt2 for this machine into the user's cache; a finished earlier result is used as it is."""
    why = ", ".join(differs)
    if not (folder / storage.PROGRAM).exists():
        raise ArtifactError(
            f"made for another machine ({why}) and it holds no portable graph", where=str(folder)
        )
    if not trust_code:
        store.require_trust(folder, "graph.pt2, to lower it again for this machine")
    key = store.digest(
        json.dumps([manifest.files, target_of(backend, manifest.backend, device)], sort_keys=True).encode()
    )
    place = paths.cache("lowered") / key
    notes.append(Finding("open", "lowered again", str(place), why=f"made for another machine: {why}"))
    if place.exists():
        _link_to(folder, place)
        return place
    if reason := backend.missing():  # it may be able to open what it can't make
        raise NotUsableError(
            f"made for another machine ({why}), and it can't be lowered again on this one: {reason}",
            where=str(folder),
            hint="Make it with --backend eager or ort, which open everywhere",
        )
    with tempfile.TemporaryDirectory(dir=place.parent) as work:
        fresh = Path(work) / key
        fresh.mkdir(mode=0o700)
        _link_to(folder, fresh)
        encoder_decoder_graphs.lower(backend, storage.load(folder), manifest.plan.with_(device=device), fresh)
        with contextlib.suppress(OSError):  # another process was first: its result is equal
            fresh.rename(place)
    return place


def _link_to(folder: Path, place: Path) -> None:
    """Link graph and weights in `place` to those of `folder`.

    `place` was lowered from an equal artifact, which may have moved or changed since.
    """
    for source, link in encoder_decoder_graphs.links(folder, place):
        target = str(source.resolve())
        if link.is_symlink() and os.readlink(link) == target:
            continue
        fresh = link.with_name(f".{link.name}.{os.getpid()}")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(target)
        fresh.replace(link)
