"""Configuration of a LoRA adapter, read as PEFT reads it; unsupported fields are refused by name.

Each field is read here, has no effect on the outputs, or must have the value that switches it off. A field that is not
in these tables is refused unless its value is empty, so that a field of a later PEFT release is never ignored.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ...errors import SourceError
from .patterns import check_pattern, first_match, is_named

CONFIG = "adapter_config.json"
MAX_CONFIG = 1 << 20  # bytes
MATCH_SECONDS = 5.0  # for all names and patterns of one adapter

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


Rank = Annotated[int, msgspec.Meta(ge=1)]
Number = Annotated[float, msgspec.Meta(ge=-1e38, le=1e38)]
Names = list[str] | str | None


class LoraConfig(msgspec.Struct, frozen=True):
    """The fields that decide where an adapter acts and how strongly, by their names in adapter_config.json."""

    r: Rank = 8
    lora_alpha: Number = 8.0
    use_rslora: bool = False
    rank_pattern: dict[str, Rank] = {}
    alpha_pattern: dict[str, Number] = {}
    target_modules: Names = None
    exclude_modules: Names = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: Names = None

    @property
    def layers(self) -> Sequence[int] | None:
        """Numbers of the layers to transform, None for all of them: PEFT takes an empty list as that too."""
        layers = self.layers_to_transform
        return [layers] if isinstance(layers, int) else layers or None

    def patterns(self) -> list[str]:
        """List all regular expressions in it."""
        each = [*self.rank_pattern, *self.alpha_pattern, *self._layers_patterns]
        return each + [
            names for names in (self.target_modules, self.exclude_modules) if isinstance(names, str)
        ]

    def rank_of(self, name: str) -> int:
        return int(first_match(self.rank_pattern, name, self.r))

    def scale_of(self, name: str) -> float:
        rank = self.rank_of(name)
        alpha = float(first_match(self.alpha_pattern, name, self.lora_alpha))
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def adapts(self, name: str) -> bool:
        """Return true if PEFT gives a layer an adapter, or decides by the class of the base model."""
        targets = self.target_modules
        if is_named(self.exclude_modules, name):
            return False
        if targets is None or targets == "all-linear":
            return True
        if isinstance(targets, str) or self.layers is None:
            return is_named(targets, name)
        return is_named(targets, name) and self._index(name) in self.layers

    def check_time(self, names: Sequence[str], path: Path) -> None:
        """Match each name once; raise `SourceError` when the patterns take longer than a load may."""
        deadline = time.monotonic() + MATCH_SECONDS
        for name in names:
            self.adapts(name)
            self.scale_of(name)
            if time.monotonic() > deadline:
                raise SourceError(
                    f"the patterns take longer than {MATCH_SECONDS:g} s to match", where=str(path)
                )

    @property
    def _layers_patterns(self) -> Sequence[str]:
        given = self.layers_pattern or ()
        return [given] if isinstance(given, str) else given

    def _index(self, name: str) -> int:
        """Return the first number in a name, as PEFT takes it, or -1."""
        patterns = [rf"(?:^|.*?\.){p}" for p in self._layers_patterns] or [r".*?\.[^.]*"]
        for pattern in patterns:
            if match := re.match(rf"{pattern}\.(?P<idx>\d+)\.", name):
                return int(match["idx"])
        return -1


_READ = {"peft_type", "init_lora_weights", *LoraConfig.__struct_fields__}


def read_config(folder: Path) -> LoraConfig:
    """Read adapter_config.json; raises `SourceError` for anything in it that is not computed here."""
    path = folder / CONFIG
    given = _load(folder, path)
    for field, value in given.items():
        _check_field(field, value, path)
    try:
        config = msgspec.convert({name: v for name, v in given.items() if v is not None}, LoraConfig)
    except msgspec.ValidationError as error:
        raise SourceError(str(error), where=str(path)) from error
    if config.layers is not None and isinstance(config.target_modules, str):
        raise SourceError("layers_to_transform needs target_modules as a list", where=str(path))
    for pattern in config.patterns():
        check_pattern(pattern, path)
    return config


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
