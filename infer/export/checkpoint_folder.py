"""Hugging Face folders: weights decoded to float, or packed as compressed-tensors (llm-compressor's format)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..load.weights import WeightReader
from ..load.weights.safetensors_writer import Meta, write_safetensors

GROUP = 128
PACKED = {"int4": 4, "int8": 8}  # type → bits of a code
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_KEPT = ("lm_head", "embed_tokens", "wte")  # stay float, as llm-compressor leaves them by default


@dataclass(frozen=True)
class PackedLinear:
    """Codes of a weight [out, in] in int32 words, symmetric around 2**(bits - 1), with a scale for each group."""

    bits: int
    group: int
    weight: Tensor

    def parts(self, stem: str) -> dict[str, Tensor]:
        """Return `weight_packed`, `weight_scale` (bfloat16) and `weight_shape` by name."""
        rows, columns = self.weight.shape
        half = 1 << self.bits - 1
        blocks = self.weight.reshape(rows, columns // self.group, self.group)
        scale = (blocks.abs().amax(2) / (half - 0.5)).clamp_min(1e-10).to(torch.bfloat16)
        codes = (blocks / scale.float()[:, :, None]).round().clamp(-half, half - 1).reshape(
            rows, columns
        ) + half
        return {
            f"{stem}.weight_packed": _words(codes.to(torch.int64), self.bits),
            f"{stem}.weight_scale": scale,
            f"{stem}.weight_shape": torch.tensor([rows, columns]),
        }


def _words(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [rows, K] into int32 [rows, K * bits / 32], lowest bits first."""
    per = 32 // bits
    shifts = torch.arange(per) * bits
    words = (codes.reshape(len(codes), -1, per) << shifts).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def quantization_config(kind: str, group: int, ignored: list[str]) -> dict[str, Any]:
    """Return `quantization_config` of a folder whose Linear layers are packed."""
    strategy = {"strategy": "group", "group_size": group} if kind == "int4" else {"strategy": "channel"}
    weights = {"num_bits": PACKED[kind], "type": "int", "symmetric": True, **strategy}
    return {
        **{
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
        },
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ignored,
    }


def write_folder(
    folder: Path, reader: WeightReader, config: Mapping[str, Any], files: Mapping[str, Path], kind: str
) -> int:
    """Write config.json, the files of the tokenizer and model.safetensors; returns how many weights were packed."""
    packed = {
        name: group for name in reader.names() if kind in PACKED and (group := _group(reader, name, kind))
    }
    dtype = DTYPES.get(kind, torch.bfloat16)
    metas: dict[str, Meta] = {}
    for name in reader.names():
        shape = tuple(reader.shape(name))
        if name not in packed:
            stored = reader.dtype(name)
            metas[name] = (dtype if stored.is_floating_point else stored, shape)
            continue
        stem, bits = name.removesuffix(".weight"), PACKED[kind]
        metas[f"{stem}.weight_packed"] = (torch.int32, (shape[0], shape[1] * bits // 32))
        metas[f"{stem}.weight_scale"] = (torch.bfloat16, (shape[0], shape[1] // packed[name]))
        metas[f"{stem}.weight_shape"] = (torch.int64, (2,))
    held: dict[str, Tensor] = {}

    def give(name: str) -> Tensor:
        stem, _, part = name.rpartition(".weight_")
        if not stem or f"{stem}.weight" not in packed:
            return reader.read(name).to(metas[name][0])
        if name not in held:
            weight = f"{stem}.weight"
            held.clear()
            held.update(PackedLinear(PACKED[kind], packed[weight], reader.read(weight).float()).parts(stem))
        return held[name]

    content = {key: value for key, value in config.items() if key != "quantization_config"}
    if packed:
        group = min(packed.values()) if kind == "int4" else 0
        left = sorted(
            {name.removesuffix(".weight") for name in reader.names() if name.endswith("proj.weight")}
        )
        ignored = ["lm_head", *(name for name in left if f"{name}.weight" not in packed)]
        content["quantization_config"] = quantization_config(kind, group, ignored)
    else:
        content |= {"dtype": str(dtype).removeprefix("torch.")}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
    for name, path in files.items():
        if name != "config.json":
            shutil.copyfile(path, folder / name)
    write_safetensors(folder / "model.safetensors", metas, give, {"format": "pt"})
    return len(packed)


def _group(reader: WeightReader, name: str, kind: str) -> int:
    """Return the columns that share a scale; 0 for a tensor that is not packed."""
    shape = tuple(reader.shape(name))
    is_layer = name.endswith(".weight") and len(shape) == 2 and not any(part in name for part in _KEPT)
    if not is_layer or shape[1] % GROUP:
        return 0
    return GROUP if kind == "int4" else shape[1]
