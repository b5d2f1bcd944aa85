"""Pooling of sentence encoders, as configured in a sentence-transformers folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import SourceError
from ..regular_files import MAX_JSON, read_regular

MODES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
}
KNOWN = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True)
class Pooling:
    """Pooling over real tokens (`mode`: cls, max, mean), then L2 normalization when `normalize`."""

    mode: str = "mean"
    normalize: bool = True

    def __call__(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """Pool hidden states [batch, seq, dim] by attention_mask [batch, seq] of 0 and 1 → [batch, dim]."""
        if self.mode == "cls":
            pooled = hidden[:, 0]
        elif self.mode == "max":
            away = (attention_mask == 0).unsqueeze(-1)
            pooled = hidden.masked_fill(away, torch.finfo(hidden.dtype).min).amax(dim=1)
        else:
            weight = attention_mask.unsqueeze(-1).to(hidden.dtype)
            pooled = (hidden * weight).sum(dim=1) / weight.sum(dim=1).clamp(min=1e-9)
        return torch.nn.functional.normalize(pooled, p=2.0, dim=-1) if self.normalize else pooled


def read_pooling(folder: Path) -> Pooling:
    """Read modules.json and 1_Pooling/config.json; default to normalized mean."""
    listing = folder / "modules.json"
    if not listing.is_file():
        return Pooling()
    modules = _json(listing)
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    foreign = [kind for kind in kinds if kind not in KNOWN]
    if foreign:
        raise SourceError(f"expected the modules {', '.join(KNOWN)}, got {foreign[0]!r}", where=str(listing))
    mode = "mean"
    for module, kind in zip(modules, kinds, strict=True):
        if kind == "Pooling":
            mode = _mode(folder / Path(str(module.get("path", ""))).name / "config.json")
    return Pooling(mode, "Normalize" in kinds)


def _mode(path: Path) -> str:
    config = _json(path)
    if config.get("pooling_mode") in MODES.values():
        return str(config["pooling_mode"])
    on = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    if len(on) != 1 or on[0] not in MODES:
        raise SourceError(
            f"expected one of {', '.join(MODES)}, got {', '.join(on) or 'none'}", where=str(path)
        )
    return MODES[on[0]]


def _json(path: Path) -> Any:
    try:
        return json.loads(read_regular(path, MAX_JSON))
    except (ValueError, RecursionError) as error:
        raise SourceError(f"expected JSON: {error}", where=str(path)) from error
