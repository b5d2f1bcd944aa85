"""Artifacts of language models as sources of an export: weights by the names of transformers' modules.

Nothing of the artifact is run: its manifest is checked, its weights are read from weights/model.safetensors, where
packed ones lie as `model.NAME.packed.PART` and tied ones are aliases in the metadata.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from .. import plugins
from ..artifact import store
from ..artifact.manifest import Manifest
from ..errors import NotUsableError
from ..graph.storage import ENCODER, WEIGHTS
from ..kernels.ops.bitpack import LEVELS
from ..kernels.ops.groupwise_codes import SUPER
from ..load.model_metadata import read_json
from ..load.weights import StoredCodes, WeightReader, open_reader

HINT = "Export the source that it was made from"
_PACKED = ".packed."
_SCALES = ("weight_scale", "scale")


@dataclass(frozen=True)
class PackedTensors:
    """Packed tensors of one weight by part, and the names that they have in the file."""

    reader: WeightReader
    names: Mapping[str, str]
    format: str  # what stands after --quant

    def shape_of(self, part: str) -> tuple[int, ...]:
        return tuple(self.reader.shape(self.names[part]))

    def read(self, part: str) -> Tensor:
        return self.reader.read(self.names[part])

    def rows(self, part: str, start: int, stop: int) -> Tensor:
        return self.reader.rows(self.names[part], start, stop)

    def decoded(self) -> Tensor:
        """Return the float32 weight [N, K]."""
        quantizer = plugins.get("infer.compress.formats", self.format.partition(":")[0])
        found: Tensor = quantizer.dequantize({part: self.read(part) for part in self.names})
        return found

    def codes(self) -> StoredCodes:
        """Return the codes with scales as `kernels.ops.groupwise_codes` has them; or the reason why there are none."""
        count = self.shape_of("codes")[0]
        if "x_multiplier" in self.names:
            return StoredCodes.without(
                self.format, "its columns are scaled by the balance with the activations"
            )
        if self.reader.dtype(self.names["codes"]) not in (torch.int8, torch.uint8):
            return StoredCodes.without(self.format, "its codes are float8")
        if "row_scale" in self.names:
            if self.shape_of("table") != (1, 16):
                return StoredCodes.without(self.format, "its tables are not one of 16 values")
            return self._described(self._by_table, 2 * self.shape_of("codes")[1])
        if "table" not in self.names and "super_scale" not in self.names and len(self.shape_of("codes")) == 2:
            scale = next(part for part in _SCALES if part in self.names)
            if self.shape_of(scale) == (count,):
                return self._described(self._by_rows, self.shape_of("codes")[1])
        bits = 8 if "table" not in self.names else self.shape_of("table")[1].bit_length() - 1
        columns = self.shape_of("codes")[1] * 8 // bits
        order = self.read("order") if "order" in self.names else None
        return StoredCodes(self.format, (count, columns), self._as_stored, order=order)

    def _described(self, rows: Any, columns: int) -> StoredCodes:
        return StoredCodes(self.format, (self.shape_of("codes")[0], columns), rows)

    def _as_stored(self, start: int, stop: int) -> dict[str, Tensor]:
        return {
            part: self.read(part) if part == "table" else self.rows(part, start, stop)
            for part in self.names
            if part != "order"
        }

    def _by_rows(self, start: int, stop: int) -> dict[str, Tensor]:
        scale = next(part for part in _SCALES if part in self.names)
        return {"codes": self.rows("codes", start, stop), "scale": self.rows(scale, start, stop)[:, None]}

    def _by_table(self, start: int, stop: int) -> dict[str, Tensor]:
        found = {part: self.rows(part, start, stop) for part in ("codes", "scale")}
        step = self.rows("row_scale", start, stop).float() / LEVELS
        columns = 2 * found["codes"].shape[1]
        supers = step[:, None].expand(-1, -(-columns // SUPER)).contiguous()
        return {**found, "table": self.read("table"), "super_scale": supers}


class ArtifactReader:
    """Reader of the weights of an artifact under transformers' names; packed ones are decoded to float32.

    Raises `NotUsableError` where the artifact lacks a weight of `shapes`, or holds it in another shape.
    """

    def __init__(self, folder: Path, manifest: Manifest, shapes: Mapping[str, tuple[int, ...]]) -> None:
        inner = open_reader(folder / WEIGHTS)
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            aliases = json.loads((file.metadata() or {}).get("aliases", "{}"))
        held = {name: name for name in inner.names()} | aliases
        formats = {layer.name: layer.format for layer in manifest.layers}
        self._reader, self._shapes, self._last = inner, dict(shapes), ("", torch.empty(0))
        self._float: dict[str, str] = {}
        self._packed: dict[str, PackedTensors] = {}
        parts: dict[str, dict[str, str]] = {}
        for name, stored in held.items():
            stem, found, part = name.rpartition(_PACKED)
            if found:
                parts.setdefault(stem, {})[part] = stored
        for name, shape in shapes.items():
            layer = "model." + name.removesuffix(".weight")
            if layer in parts:
                self._packed[name] = PackedTensors(inner, parts[layer], formats.get(layer, ""))
                if not self._packed[name].format:
                    raise _lacks(folder, f"the format of {name!r}")
                continue
            found = next((held[one] for one in (f"model.{name}", f"{layer}.weight") if one in held), "")
            if not found or tuple(inner.shape(found)) != shape:
                raise _lacks(folder, f"{name!r} of shape {list(shape)}")
            self._float[name] = found

    def names(self) -> list[str]:
        return list(self._shapes)

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32 if name in self._packed else self._reader.dtype(self._float[name])

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> Tensor:
        if name not in self._packed:
            return self._reader.read(self._float[name])
        if self._last[0] != name:
            self._last = name, self._packed[name].decoded().reshape(self._shapes[name])
        return self._last[1].clone()

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        if name not in self._packed:
            return self._reader.rows(self._float[name], start, stop)
        if self._last[0] != name:
            self.read(name)
        return self._last[1][start:stop].clone()

    def codes(self, name: str) -> StoredCodes | None:
        """Return the codes of a packed matrix; None for a weight in float."""
        if name not in self._packed:
            return None
        if len(self._shapes[name]) != 2:
            return StoredCodes.without(self._packed[name].format, "it holds the rows of all experts")
        return self._packed[name].codes()


@dataclass(frozen=True)
class ArtifactSource:
    """An opened artifact: its weights, its config.json, and the files of its tokenizer by name."""

    folder: Path
    reader: ArtifactReader
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
    tied, shapes = _modules(folder)
    names = {name: shape for name, shape in shapes.items() if not (tied and name == "lm_head.weight")}
    kept = {"config.json", "generation_config.json", "chat_template.jinja", "preprocessor_config.json"}
    files = {
        path.name: path
        for path in folder.iterdir()
        if path.name in kept or path.name.startswith(("tokenizer", "special_tokens", "vocab", "merges"))
    }
    return ArtifactSource(folder, ArtifactReader(folder, manifest, names), config, files)


def _modules(folder: Path) -> tuple[bool, dict[str, tuple[int, ...]]]:
    """Return whether the head is the embedding, and the shapes of all parameters of the model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise NotUsableError(
            f"transformers has no causal language model for this artifact: {str(error)[:200]}",
            where=str(folder),
            hint=HINT,
        ) from error
    return bool(config.tie_word_embeddings), {
        name: tuple(tensor.shape) for name, tensor in model.state_dict().items()
    }


def _lacks(folder: Path, what: str) -> NotUsableError:
    return NotUsableError(
        f"the artifact lacks {what}: its graph was rewritten, or has adapters", where=str(folder), hint=HINT
    )
