"""Weight files of a Hugging Face folder: safetensors, or else `pytorch_model.bin`, whole or in shards."""

from __future__ import annotations

from pathlib import Path

from ...errors import SourceError
from ...weights import Checkpoint, joined
from ...weights.safetensors_file import open_safetensors
from ...weights.shard_index import shards, weight_map
from ..sources.state_dict_source import open_weights_only

SAFETENSORS_INDEX = "model.safetensors.index.json"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def open_weights(folder: Path) -> tuple[Checkpoint, str]:
    """Open the weights of a folder; also return a note on files that hold pickles, which are read as weights only.

    Raises `SourceError` for missing or damaged shards, `UnsafeSourceError` for a pickle that names code.
    """
    if any(folder.glob("*.safetensors")):
        return open_safetensors(_safetensors(folder)).weights, ""
    paths = _pickles(folder)
    checkpoint = joined(("", open_weights_only(path)[0]) for path in paths)
    promised = weight_map(folder / PICKLE_INDEX) if (folder / PICKLE_INDEX).is_file() else {}
    if lost := [name for name in promised if name not in checkpoint]:
        raise SourceError(
            f"the index promises {lost[0]!r}, which is in no shard", where=str(folder / PICKLE_INDEX)
        )
    names = paths[0].name if len(paths) == 1 else f"{len(paths)} shards"
    return checkpoint, f"{names}: a pickle, read as weights only"


def _safetensors(folder: Path) -> list[Path]:
    index = folder / SAFETENSORS_INDEX
    if index.is_file():
        return [index]
    files = sorted(folder.glob("*.safetensors"))
    if (folder / "model.safetensors") in files:
        return [folder / "model.safetensors"]
    return files


def _pickles(folder: Path) -> list[Path]:
    index = folder / PICKLE_INDEX
    if not index.is_file():
        if (folder / PICKLE).is_file():
            return [folder / PICKLE]
        raise SourceError(f"expected {PICKLE} or {PICKLE_INDEX}", where=str(folder))
    return shards(index)
