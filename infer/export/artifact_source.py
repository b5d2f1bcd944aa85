"""Artifacts of language models as sources of an export: weights by the names of transformers' modules.

Nothing of the artifact is run: its manifest is checked, its weights are read from weights/model.safetensors, where
packed ones lie as `model.NAME.packed.PART` and tied ones are aliases in the metadata.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..artifact import store
from ..artifact.manifest import Manifest
from ..errors import ArtifactError, NotUsableError
from ..graph.storage import ENCODER, WEIGHTS
from ..kernels.expert_layers import ExpertLinear
from ..load.model_patches.moe_layers import split_experts
from ..load.sources.folder_model import read_settings
from ..regular_files import read_json
from ..weights import Checkpoint, StoredCodes, Weight
from ..weights.safetensors_file import SafetensorsFiles, open_safetensors
from .packed_tensors import PackedTensors

HINT = "Export the source that it was made from"
_PACKED = ".packed."


def artifact_weights(
    folder: Path,
    manifest: Manifest,
    shapes: Mapping[str, tuple[int, ...]],
    by_columns: Collection[str] = (),
) -> dict[str, Weight]:
    """Return the weights of an artifact under transformers' names; packed ones are decoded to float32.

    `by_columns`: weights of experts that transformers has as [experts, K, N], the artifact as rows [experts * N, K].
    Raises `NotUsableError` where the artifact lacks a weight of `shapes`, or holds it in another shape.
    """
    file = open_safetensors(folder / WEIGHTS)
    held = {**file.weights, **{name: file.weights[stored] for name, stored in _aliases(file, folder).items()}}
    formats = {layer.name: layer.format for layer in manifest.layers}
    parts: dict[str, dict[str, Weight]] = {}
    for name, weight in held.items():
        stem, packed, part = name.rpartition(_PACKED)
        if packed:
            parts.setdefault(stem, {})[part] = weight
    packed_weights = _PackedWeights(folder)
    found: dict[str, Weight] = {}
    for name, shape in shapes.items():
        layer = "model." + name.removesuffix(".weight")
        if layer in parts:
            tensors = PackedTensors(parts[layer], formats.get(layer, ""))
            found[name] = packed_weights.weight(name, tensors, shape, by_columns=name in by_columns)
            continue
        stored = next((held[one] for one in (f"model.{name}", f"{layer}.weight") if one in held), None)
        if stored is None or stored.shape != shape:
            raise _lacks(folder, f"{name!r} of shape {list(shape)}")
        found[name] = stored
    return found


class _PackedWeights:
    """Packed weights of an artifact, decoded; the last one is kept, as it is read in blocks of rows."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._last = folder, ("", torch.empty(0))

    def weight(self, name: str, packed: PackedTensors, shape: tuple[int, ...], *, by_columns: bool) -> Weight:
        """Return a weight of packed tensors; raise where they do not fit its shape."""
        if not packed.format:
            raise _lacks(self._folder, f"the format of {name!r}")
        columns = shape[1] if by_columns else shape[-1]
        if why := packed.wrong(torch.Size(shape).numel() // max(columns, 1), columns):
            raise _damaged(self._folder, name, why)

        def rows(start: int, stop: int) -> Tensor:
            if self._last[0] != name:
                decoded = self._decoded(name, packed, shape)
                if by_columns:
                    decoded = decoded.reshape(shape[0], shape[2], shape[1]).transpose(1, 2)
                self._last = name, decoded.reshape(shape)
            return self._last[1][start:stop].clone()

        def codes() -> StoredCodes:
            found = packed.codes()
            if found.refused or len(shape) == 2:
                return found
            if by_columns:
                return StoredCodes.without(found.kind, "transformers stores its experts by columns")
            return replace(found, experts=True)

        return Weight(torch.float32, shape, rows, codes=codes)

    def _decoded(self, name: str, packed: PackedTensors, shape: tuple[int, ...]) -> Tensor:
        try:
            rows = packed.decoded()
        except ValueError as error:
            raise _damaged(self._folder, name, str(error)[:200]) from error
        if rows.numel() != torch.Size(shape).numel():
            raise _damaged(self._folder, name, f"they decode to {list(rows.shape)}")
        return rows


@dataclass(frozen=True)
class ArtifactSource:
    """An opened artifact: its weights, its config.json, and the files of its tokenizer by name."""

    folder: Path
    weights: Checkpoint
    config: dict[str, Any]
    files: dict[str, Path]


def is_artifact(folder: Path) -> bool:
    """Return true for a folder with the manifest of an artifact."""
    return (folder / store.MANIFEST).is_file() and (folder / store.SIGNATURE).is_file()


def open_artifact(folder: Path) -> ArtifactSource:
    """Open an artifact of a decoder; every file is compared with the manifest first.

    Raises `ArtifactError` for damage, and `NotUsableError` for another task, a backend whose compiled form holds the
    weights, and a model that transformers' causal language models do not include.
    """
    manifest = store.read_manifest(folder)
    if manifest.task != "text-generation" or (folder / ENCODER).exists():
        raise NotUsableError(
            f"an artifact of task {manifest.task} is not exported; expected a language model that is a decoder",
            where=str(folder),
            hint=HINT,
        )
    if not (folder / WEIGHTS).is_file() or not (folder / "config.json").is_file():
        raise NotUsableError(
            f"the artifact, compiled for {manifest.backend}, holds its weights in the compiled form only",
            where=str(folder),
            hint="Make one with --backend inductor or eager, or export its source",
        )
    store.verify(folder, manifest)
    config = dict(read_json(folder / "config.json"))
    tied, shapes, by_columns = _parameters(folder)
    if tied and not _shares_head(folder):
        tied = config["tie_word_embeddings"] = False
    names = {name: shape for name, shape in shapes.items() if not (tied and name == "lm_head.weight")}
    kept = {"config.json", "generation_config.json", "chat_template.jinja", "preprocessor_config.json"}
    files = {
        path.name: path
        for path in folder.iterdir()
        if path.name in kept or path.name.startswith(("tokenizer", "special_tokens", "vocab", "merges"))
    }
    return ArtifactSource(folder, artifact_weights(folder, manifest, names, by_columns), config, files)


def _parameters(folder: Path) -> tuple[bool, dict[str, tuple[int, ...]], set[str]]:
    """Return whether the head is the embedding, the shapes of all parameters, and which experts lie by columns."""
    from transformers import AutoModelForCausalLM

    try:
        config = read_settings(folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise NotUsableError(
            f"transformers has no causal language model for this artifact: {str(error)[:200]}",
            where=str(folder),
            hint=HINT,
        ) from error
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    experts = (
        module for module in split_experts(model).named_modules() if isinstance(module[1], ExpertLinear)
    )
    return bool(config.tie_word_embeddings), shapes, {name for name, layer in experts if layer.transposed}


def _shares_head(folder: Path) -> bool:
    """Return true where every tensor of the head is that of another layer."""
    file = open_safetensors(folder / WEIGHTS)
    held = {name: name for name in file.weights} | _aliases(file, folder)
    head = {name for name in held if name.startswith("model.lm_head.")}
    others = {stored for name, stored in held.items() if name not in head}
    return all(held[name] in others for name in head)


def _aliases(file: SafetensorsFiles, folder: Path) -> dict[str, str]:
    """Return the names of tied tensors and those that hold their values."""
    try:
        found = json.loads(file.metadata.get("aliases", "{}"))
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"the aliases of the weights are damaged: {error}", where=str(folder)) from error
    if not isinstance(found, dict) or not all(
        isinstance(one, str) and one in file.weights for one in found.values()
    ):
        raise ArtifactError("the aliases of the weights name no tensors of the file", where=str(folder))
    return found


def _damaged(folder: Path, name: str, why: str) -> ArtifactError:
    return ArtifactError(f"the packed tensors of {name!r} do not fit each other: {why}", where=str(folder))


def _lacks(folder: Path, what: str) -> NotUsableError:
    return NotUsableError(
        f"the artifact lacks {what}: its graph was rewritten, or has adapters", where=str(folder), hint=HINT
    )
