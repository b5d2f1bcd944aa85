"""Configuration of a LoRA adapter, read as PEFT reads it; unsupported fields are refused by name.

Each field is read here, has no effect on the outputs, or must have the value that switches it off. A field that is not
in these tables is refused unless its value is empty, so that a field of a later PEFT release is never ignored.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import SourceError
from .patterns import check_pattern, first_match, is_named

CONFIG = "adapter_config.json"
MAX_CONFIG = 1 << 20  # bytes
MATCH_SECONDS = 5.0  # for all names and patterns of one adapter

_READ = {
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
}  # fmt: skip
# Training, provenance, and initializations whose results are the saved A and B; fan_in_fan_out is how the base weight
# is stored, which does not matter to the added product; tied layers are none that take adapters.
_NO_EFFECT = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "fan_in_fan_out", "megatron_core", "qalora_group_size", "runtime_config", "eva_config",
    "corda_config", "lora_ga_config", "loftq_config", "ensure_weight_tying",
}  # fmt: skip
# Fields that change the computation → the values that switch them off, besides null.
_OFF: dict[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "bias": ("none",),
    "modules_to_save": ([],),
    "lora_bias": (False,),
    "trainable_token_indices": ([], {}),
    "layer_replication": ([],),
    "target_parameters": ([],),
    "alora_invocation_tokens": (),
    "arrow_config": (),
    "use_qalora": (False,),
    "use_bdlora": (False,),
    "megatron_config": (),
    "velora_config": (),
    "kasa_config": (),
    "monteclora_config": (),
}
_INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")  # that leave the base weights alone
_RESIDUAL = re.compile(r"pissa(_niter_\d+)?|corda|olora|lora_ga|loftq", re.IGNORECASE)
_CONVERT = "Save it again with PEFT's save_pretrained(…, path_initial_model_for_weight_conversion=…)"


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """The fields that decide where an adapter acts and how strongly."""

    path: Path
    rank: int = 8
    alpha: float = 8.0
    rslora: bool = False
    ranks: Mapping[str, int] = dataclasses.field(default_factory=dict)
    alphas: Mapping[str, float] = dataclasses.field(default_factory=dict)
    targets: Sequence[str] | str | None = None
    excluded: Sequence[str] | str | None = None
    layers: Sequence[int] | None = None
    layers_pattern: Sequence[str] = ()

    def rank_of(self, name: str) -> int:
        return int(first_match(self.ranks, name, self.rank))

    def scale_of(self, name: str) -> float:
        rank = self.rank_of(name)
        return float(first_match(self.alphas, name, self.alpha)) / (math.sqrt(rank) if self.rslora else rank)

    def adapts(self, name: str) -> bool:
        """Return true if PEFT gives a layer an adapter, or decides by the class of the base model."""
        if is_named(self.excluded, name):
            return False
        if self.targets is None or self.targets == "all-linear":
            return True
        if isinstance(self.targets, str) or self.layers is None:
            return is_named(self.targets, name)
        return is_named(self.targets, name) and self._index(name) in self.layers

    def check_time(self, names: Sequence[str]) -> None:
        """Match each name once; raise `SourceError` when the patterns take longer than a load may."""
        deadline = time.monotonic() + MATCH_SECONDS
        for name in names:
            self.adapts(name)
            self.scale_of(name)
            if time.monotonic() > deadline:
                raise SourceError(
                    f"the patterns take longer than {MATCH_SECONDS:g} s to match", where=str(self.path)
                )

    def _index(self, name: str) -> int:
        """Return the first number in a name, as PEFT takes it, or -1."""
        patterns = [rf"(?:^|.*?\.){p}" for p in self.layers_pattern] or [r".*?\.[^.]*"]
        for pattern in patterns:
            if match := re.match(rf"{pattern}\.(?P<idx>\d+)\.", name):
                return int(match["idx"])
        return -1


def read_config(folder: Path) -> LoraConfig:
    """Read adapter_config.json; raises `SourceError` for anything in it that is not computed here."""
    path = folder / CONFIG
    config = _load(folder, path)
    for field, value in config.items():
        _check_field(field, value, path)
    patterns = {key: _mapping(config, key, path) for key in ("rank_pattern", "alpha_pattern")}
    layers = config.get("layers_to_transform")
    found = LoraConfig(
        path=path,
        rank=_rank(config.get("r", 8), "r", path),
        alpha=_number(config.get("lora_alpha", 8), "lora_alpha", path),
        rslora=_flag(config, "use_rslora", path),
        ranks={k: _rank(v, "rank_pattern", path) for k, v in patterns["rank_pattern"].items()},
        alphas={k: _number(v, "alpha_pattern", path) for k, v in patterns["alpha_pattern"].items()},
        targets=_names(config, "target_modules", path),
        excluded=_names(config, "exclude_modules", path) or None,
        layers=_indices(layers, path),
        layers_pattern=_listed(_names(config, "layers_pattern", path)),
    )
    if found.layers is not None and isinstance(found.targets, str):
        raise SourceError("layers_to_transform needs target_modules as a list", where=str(path))
    for pattern in [*found.ranks, *found.alphas, *found.layers_pattern]:
        check_pattern(pattern, path)
    for whole in (found.targets, found.excluded):
        if isinstance(whole, str):
            check_pattern(whole, path)
    return found


def _load(folder: Path, path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise SourceError(f"no {CONFIG}", where=str(folder), hint="Expected a folder saved by PEFT")
    if path.stat().st_size > MAX_CONFIG:
        raise SourceError(f"{CONFIG} is larger than {MAX_CONFIG} bytes", where=str(folder))
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise SourceError(f"expected JSON: {error}", where=str(path)) from error
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if not isinstance(config, dict) or kind != "LORA":
        raise SourceError(f"expected peft_type LORA, got {kind!r:.60}", where=str(path))
    return config


def _check_field(field: str, value: Any, path: Path) -> None:
    if field in _READ or field in _NO_EFFECT or value is None:
        if field == "init_lora_weights":
            _check_init(value, path)
        return
    if field in _OFF:
        if not any(value is off if isinstance(off, bool) else value == off for off in _OFF[field]):
            raise SourceError(f"adapters with {field} {value!r:.60} are not supported", where=str(path))
    elif not (value is False or value in ([], {}, "")):
        raise SourceError(f"{field!r:.60} is an unknown field, here {value!r:.60}", where=str(path))


def _check_init(value: Any, path: Path) -> None:
    if isinstance(value, str) and _RESIDUAL.fullmatch(value):
        why = "the adapter belongs to base weights that its initialization changed, not to the original ones"
        hint = _CONVERT if value.lower() != "loftq" else "Train it on the base weights that are served"
        raise SourceError(f"init_lora_weights {value!r}: {why}", where=str(path), hint=hint)
    if not (isinstance(value, bool) or value in _INITS):
        raise SourceError(f"init_lora_weights {value!r:.60} is not supported", where=str(path))


def _mapping(config: Mapping[str, Any], key: str, path: Path) -> dict[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise SourceError(f"expected an object as {key}, got {value!r:.60}", where=str(path))
    return value


def _number(value: Any, key: str, path: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e38:
        raise SourceError(f"expected finite numbers as {key}, got {value!r:.60}", where=str(path))
    return float(value)


def _rank(value: Any, key: str, path: Path) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SourceError(f"expected positive integers as {key}, got {value!r:.60}", where=str(path))
    return value


def _flag(config: Mapping[str, Any], key: str, path: Path) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise SourceError(f"expected true or false as {key}, got {value!r:.60}", where=str(path))
    return bool(value)


def _names(config: Mapping[str, Any], key: str, path: Path) -> Sequence[str] | str | None:
    value = config.get(key)
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise SourceError(f"expected names as {key}, got {value!r:.60}", where=str(path))
    return value


def _indices(value: Any, path: Path) -> Sequence[int] | None:
    """Return the layers to transform; empty means all of them, as in PEFT."""
    found = [value] if isinstance(value, int) else value
    if found is not None and not (
        isinstance(found, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in found)
    ):
        raise SourceError(f"expected integers as layers_to_transform, got {value!r:.60}", where=str(path))
    return found or None


def _listed(value: Sequence[str] | str | None) -> Sequence[str]:
    return [value] if isinstance(value, str) and value else value or ()
