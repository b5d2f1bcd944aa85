"""Hugging Face folders: weights decoded to float, or packed as compressed-tensors (llm-compressor's format)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..weights import Checkpoint
from ..weights.safetensors_writer import Meta, write_safetensors
from .exact_float import DTYPES, smallest_exact
from .gguf_writer import KEEP
from .packed_linears import GROUP, PACKED, PackedLinear, carried, quantized
from .source_report import SourceReport
from .stored_rows import Difference, blocks_of

_KEPT = ("lm_head", "embed_tokens", "wte")  # stay float, as llm-compressor leaves them by default


@dataclass
class FolderWriter:
    """Writer of a folder: layers in `kind` where it is of compressed-tensors, other weights in float.

    Of kind "keep", and where codes have the bits of `kind`, codes of the source are carried over; `report` lists them.
    """

    weights: Checkpoint
    config: Mapping[str, Any]
    files: Mapping[str, Path]
    kind: str
    report: SourceReport = field(default_factory=SourceReport)
    _rounded: dict[str, Difference] = field(default_factory=dict)

    def write(self, folder: Path) -> int:
        """Write config.json, the files of the tokenizer and model.safetensors; returns how many weights were packed."""
        packs = self.kind == KEEP or self.kind in PACKED
        packed = {name: one for name in self.weights if packs and (one := self._packed(name))}
        dtype = self._float_dtype(packed)
        metas: dict[str, Meta] = {}
        for name in self.weights:
            if name in packed:
                metas |= packed[name].metas(name.removesuffix(".weight"))
            else:
                stored = self.weights[name].dtype
                shape = tuple(self.weights[name].shape)
                metas[name] = (dtype if stored.is_floating_point else stored, shape)
        held: dict[str, Tensor] = {}

        def give(name: str) -> Tensor:
            stem, _, _ = name.rpartition(".weight_")
            if not stem or f"{stem}.weight" not in packed:
                return self._float(name, metas[name][0])
            if name not in held:
                held.clear()
                held.update(packed[f"{stem}.weight"].parts(stem))
            return held[name]

        content = {key: value for key, value in self.config.items() if key != "quantization_config"}
        content |= {"dtype": str(dtype).removeprefix("torch.")}
        if packed:
            content["quantization_config"] = quantization_config(packed, self._unpacked(packed))
        folder.mkdir(parents=True)
        text = json.dumps(content, indent=1, ensure_ascii=False)
        (folder / "config.json").write_text(text, encoding="utf-8")
        for name, path in self.files.items():
            if name != "config.json":
                shutil.copyfile(path, folder / name)
        write_safetensors(folder / "model.safetensors", metas, give, {"format": "pt"})
        for name, difference in self._rounded.items():
            codes = self.weights[name].codes()
            if codes is not None:
                kind = next(one for one, wanted in DTYPES.items() if wanted == dtype)
                self.report.converted(codes.kind, kind, difference.error, "it is written in float", name)
        return len(packed)

    def _packed(self, name: str) -> PackedLinear | None:
        """Return the codes of a layer, None for a tensor that stays float."""
        shape = tuple(self.weights[name].shape)
        if not name.endswith(".weight") or len(shape) != 2 or any(part in name for part in _KEPT):
            return None
        bits = PACKED.get(self.kind, 0)
        codes = self.weights[name].codes()
        if codes is not None:
            found = carried(codes, bits)
            if not isinstance(found, str):
                one, error = found
                self.report.carried(codes.kind, f"int{one.bits}", error)
                return one
        if (codes is None and not bits) or (bits == 4 and shape[1] % GROUP) or shape[1] % 32:
            return None
        bits = bits or 8
        made = quantized(self.weights, name, bits, GROUP if bits == 4 else shape[1], torch.bfloat16)
        if codes is not None:
            self.report.converted(codes.kind, f"int{bits}", self._error(made, name), str(found), name)
        return made

    def _error(self, made: PackedLinear, name: str) -> float:
        difference = Difference()
        for index in blocks_of(*made.shape):
            start, stop = int(index[0]), int(index[-1]) + 1
            difference.add(made.decoded(start, stop), self.weights[name].rows(start, stop).float())
        return difference.error

    def _float_dtype(self, packed: Mapping[str, PackedLinear]) -> torch.dtype:
        """Return the dtype of weights that are not packed; of kind "keep" the smallest that holds all of them."""
        if self.kind != KEEP:
            return DTYPES.get(self.kind, torch.bfloat16)
        names = [
            name for name in self.weights if name not in packed and self.weights[name].dtype.is_floating_point
        ]
        return DTYPES[smallest_exact(self.weights[name].read() for name in names)]

    def _float(self, name: str, dtype: torch.dtype) -> Tensor:
        values = self.weights[name].read()
        rounded = values.to(dtype)
        if values.ndim > 1 and self.weights[name].codes() is not None:
            self._rounded[name] = Difference()
            self._rounded[name].add(rounded.float().flatten(1), values.float().flatten(1))
        return rounded

    def _unpacked(self, packed: Mapping[str, PackedLinear]) -> list[str]:
        found = {name for name in self.weights if name.endswith("proj.weight")} - packed.keys()
        return ["lm_head", *sorted(name.removesuffix(".weight") for name in found)]


def quantization_config(packed: Mapping[str, PackedLinear], ignored: list[str]) -> dict[str, Any]:
    """Return `quantization_config` for exported layers: one group for all Linears, or one per form."""
    schemes: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for name, one in packed.items():
        scheme = one.scheme()
        schemes.setdefault(json.dumps(scheme), (scheme, []))[1].append(name.removesuffix(".weight"))
    groups = {
        f"group_{i}": {"targets": ["Linear"] if len(schemes) == 1 else names, "weights": scheme}
        for i, (scheme, names) in enumerate(schemes.values())
    }
    return {
        **{
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
        },
        **{"config_groups": groups, "ignore": ignored},
    }
