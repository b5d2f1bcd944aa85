"""Modules of a sentence-transformers folder: the entries of modules.json, and their layers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ...errors import SourceError, UnsafeSourceError
from ...regular_files import read_json, read_json_value
from .pooling_layers import MODES, Dense, LayerNorm, Normalize, Pooling, SpladePooling

TRANSFORMERS = ("Transformer", "MLMTransformer")
KNOWN = (
    *(*TRANSFORMERS, "Pooling", "SpladePooling", "Dense", "LayerNorm", "Normalize", "Dropout"),
    "MultiVectorMask",
)
PYLATE_DENSE = "pylate.models.Dense.Dense"  # the Dense of sentence-transformers over each token
ACTIVATIONS = (
    *(
        "Identity",
        "Tanh",
        "Sigmoid",
        "ReLU",
        "ReLU6",
        "LeakyReLU",
        "ELU",
        "SELU",
        "CELU",
        "GELU",
        "SiLU",
        "Mish",
    ),
    *("Softplus", "Softsign", "LogSigmoid", "Hardtanh", "Hardsigmoid", "Hardswish", "Tanhshrink"),
)
LEGACY = "pooling_mode_"
LEGACY_MODES = {
    "cls_token": "cls",
    "max_tokens": "max",
    "mean_tokens": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean_tokens": "weightedmean",
    "lasttoken": "lasttoken",
}


@dataclass(frozen=True)
class Module:
    """One entry of modules.json: its class name and its folder with config.json and weights."""

    kind: str
    folder: Path

    @property
    def config(self) -> dict[str, Any]:
        """The module's config.json; empty for a module that has none."""
        return read_json(self.folder / "config.json", absent_ok=True)


def transformer_folder(folder: Path) -> Path:
    """Return the folder of the Transformer's config.json and weights: an older one has it in `0_Transformer`."""
    listing = folder / "modules.json"
    return read_modules(listing)[0].folder if listing.is_file() else folder


def read_modules(listing: Path) -> list[Module]:
    """Read modules.json; raise `SourceError` for a module that is not known, and for one of the folder's own code."""
    entries = read_json_value(listing)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries) or not entries:
        raise SourceError("expected a list of modules, each an object with type and path", where=str(listing))
    found: list[Module] = []
    for entry in entries:
        kind = str(entry.get("type", "")).rpartition(".")[2]
        is_pylate = entry.get("type") == PYLATE_DENSE
        if not is_pylate and not str(entry.get("type", "")).startswith("sentence_transformers."):
            raise UnsafeSourceError(
                f"the folder needs the module {entry.get('type')!r}, which is code in the folder",
                where=str(listing),
            )
        if kind not in KNOWN:
            raise SourceError(
                f"expected the modules {', '.join(KNOWN)}, got {kind!r}",
                where=str(listing),
                hint="Export the model with torch.export, or give its parts with --model file.py:factory",
            )
        inner = Path(str(entry.get("path", "")))
        if inner.is_absolute() or len(inner.parts) > 1 or ".." in inner.parts:
            raise SourceError(f"module {kind} is outside the folder: {str(inner)!r}", where=str(listing))
        found.append(Module(kind, listing.parent / inner))
    return found


def check_order(modules: list[Module], listing: Path, *, pooled: bool) -> None:
    """Raise `SourceError` unless the modules are one Transformer and, if `pooled`, one pooling and layers over it."""
    kinds = [module.kind for module in modules]
    if kinds[0] not in TRANSFORMERS or any(kind in TRANSFORMERS for kind in kinds[1:]):
        raise SourceError(f"expected one Transformer, first; got {', '.join(kinds)}", where=str(listing))
    if not pooled and len(kinds) > 1 and any(kind.endswith("Pooling") for kind in kinds):
        raise SourceError(f"expected a Transformer alone, got {', '.join(kinds)}", where=str(listing))
    pools = [index for index, kind in enumerate(kinds) if kind.endswith("Pooling")]
    if pooled and pools != [1]:
        raise SourceError(
            f"expected one pooling, straight after the Transformer; got {', '.join(kinds)}",
            where=str(listing),
            hint="A model of one vector per token is named MultiVectorEncoder or ColBERT in its "
            "config_sentence_transformers.json",
        )


def build_pooling(module: Module) -> nn.Module:
    """Build the pooling of a Pooling or SpladePooling module; raise `SourceError` for a mode that is not known."""
    return _splade(module) if module.kind == "SpladePooling" else Pooling(_modes(module))


def _modes(module: Module) -> tuple[str, ...]:
    config = module.config
    given = config.get("pooling_mode")
    if given is None:
        on = [
            key.removeprefix(LEGACY)
            for key, value in config.items()
            if key.startswith(LEGACY) and value is True
        ]
        unknown = [name for name in on if name not in LEGACY_MODES]
        modes = [mode for name, mode in LEGACY_MODES.items() if name in on] or ["mean"]
        modes += unknown
    else:
        modes = [given] if isinstance(given, str) else list(given)
    foreign = [mode for mode in modes if mode not in MODES]
    if foreign:
        where = str(module.folder / "config.json")
        raise SourceError(f"expected pooling of {', '.join(MODES)}, got {foreign[0]!r}", where=where)
    return tuple(modes)


def _splade(module: Module) -> SpladePooling:
    config = module.config
    mode, activation = config.get("pooling_strategy", "max"), config.get("activation_function", "relu")
    if mode not in ("max", "sum") or activation not in ("relu", "log1p_relu"):
        raise SourceError(
            f"expected SPLADE pooling max or sum over relu or log1p_relu, got {mode!r} over {activation!r}",
            where=str(module.folder / "config.json"),
        )
    return SpladePooling(mode, twice=activation == "log1p_relu")


def build_layer(module: Module, over: str = "sentence_embedding") -> nn.Module:
    """Build a Dense, LayerNorm or Normalize module, its parameters on the meta device.

    `over`: the vectors that it works on, one for each text or token; raises `SourceError` for a module over others.
    """
    config, where = module.config, str(module.folder / "config.json")
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, over):
            raise SourceError(
                f"{module.kind} works on {config[key]!r}; only layers over {over!r} are opened",
                where=where,
            )
    if module.kind == "Normalize":
        return Normalize()
    if module.kind == "LayerNorm":
        return LayerNorm(_size(config, "dimension", where))
    named = str(config.get("activation_function") or "torch.nn.modules.linear.Identity")
    kind = named.rpartition(".")[2]
    if not named.startswith("torch.nn.") or kind not in ACTIVATIONS:
        raise SourceError(
            f"expected an activation of torch.nn ({', '.join(ACTIVATIONS)}), got {named!r}", where=where
        )
    sizes = _size(config, "in_features", where), _size(config, "out_features", where)
    residual = config.get("use_residual") is True
    return Dense(sizes, getattr(nn, kind)(), bias=config.get("bias", True) is not False, residual=residual)


def _size(config: dict[str, Any], key: str, where: str) -> int:
    found = config.get(key)
    if type(found) is not int or found < 1:
        raise SourceError(f"expected {key} as a positive integer, got {found!r}", where=where)
    return found


def weights_path(folder: Path) -> Path:
    """Return the weight file of a module; raise `SourceError` where there is none."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return folder / name
    raise SourceError("expected model.safetensors or pytorch_model.bin of the module", where=str(folder))
