"""Settings and tensors of the model in a GGUF file, as transformers has them.

Every setting under the architecture's name is used, or known to change nothing; others are refused, since a setting
left out silently gives wrong numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import SourceError
from .architectures import ARCHITECTURES, Architecture
from .header import GgufHeader, GgufTensor
from .reader import GgufReader, StoredTensor, expert_slices, rotary_order

FOLDER_HINT = "Give the Hugging Face folder it was made from"
# Handled apart from the architecture's own keys, or without effect on the values.
_OTHER_KEYS = frozenset(
    {
        *("vocab_size", "tensor_data_layout", "attention.value_length", "attention.causal", "pooling_type"),
        *("rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.finetuned"),
        *("rope.scaling.attn_factor", "rope.scaling.original_context_length", "rope.scale_linear"),
    }
)
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_BLOCK = re.compile(r"blk\.(\d+)\.([a-z0-9_]+)(\.weight|\.bias)")
_TOP_NAME = re.compile(r"([a-z0-9_]+)(\.weight|\.bias)")


def architecture_of(header: GgufHeader, path: Path) -> tuple[str, Architecture]:
    """Return the prefix of the architecture's keys and how it is stored; raise `SourceError` for an unknown one."""
    kind, prefix = header.metadata.get("general.type", "model"), header.metadata.get("general.architecture")
    if kind != "model":
        raise SourceError(f"expected a model, got a GGUF file of type {kind!r}", where=str(path))
    experts = bool(header.metadata.get(f"{prefix}.expert_count"))
    found = ARCHITECTURES.get(f"{prefix}+experts" if experts and prefix == "llama" else str(prefix))
    if found is None:
        known = ", ".join(name for name in ARCHITECTURES if "+" not in name)
        raise SourceError(
            f"a GGUF file of architecture {prefix!r}, which infer does not know; known: {known}",
            where=str(path),
            hint=FOLDER_HINT,
        )
    return str(prefix), found


def model_settings(header: GgufHeader, path: Path) -> dict[str, Any]:
    """Return config.json of the model; raise `SourceError` for a setting that infer does not know."""
    prefix, architecture = architecture_of(header, path)
    own = {
        key.removeprefix(f"{prefix}."): value
        for key, value in header.metadata.items()
        if key.startswith(f"{prefix}.")
    }
    unknown = [
        key
        for key in own
        if key not in architecture.keys and key not in _OTHER_KEYS and not _is_off(own[key])
    ]
    if unknown:
        raise _refused(path, f"the setting {prefix}.{unknown[0]} = {str(own[unknown[0]])[:80]}")
    if own.get("attention.causal", True) is not True or own.get("pooling_type"):
        raise _refused(path, "an embedding model (pooling_type, or attention that is not causal)")
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "architectures": [architecture.class_name],
        "vocab_size": _tensor(header, "token_embd.weight", path).shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        **architecture.fixed,
    }
    for key, name in architecture.keys.items():
        if key in own and not _is_off(own[key]):
            config[name] = _one_value(own[key], f"{prefix}.{key}", path)
    for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "max_position_embeddings"):
        if not isinstance(config.get(name), int):
            raise SourceError(f"the metadata lack {_key_of(architecture, prefix, name)}", where=str(path))
    _check_heads(config, own, prefix, path)
    return config | _attention_scale(config, architecture) | _rope(header, config, own, path)


def _is_off(value: Any) -> bool:
    return isinstance(value, bool | int | float | str) and value in (0, False, "", "none")


def _refused(path: Path, what: str) -> SourceError:
    return SourceError(
        f"{what}: infer does not read this from a GGUF file", where=str(path), hint=FOLDER_HINT
    )


def _key_of(architecture: Architecture, prefix: str, setting: str) -> str:
    return f"{prefix}." + next(key for key, name in architecture.keys.items() if name == setting)


def _one_value(value: Any, key: str, path: Path) -> Any:
    """Return a setting that is equal in all layers; arrays hold one for each."""
    if not isinstance(value, np.ndarray):
        return value
    if value.size == 0 or (value != value.flat[0]).any():
        raise _refused(path, f"the setting {key}, which differs between layers")
    return value.flat[0].item()


def _tensor(header: GgufHeader, name: str, path: Path) -> GgufTensor:
    if name not in header.tensors:
        raise SourceError(f"the file lacks the tensor {name!r}", where=str(path))
    return header.tensors[name]


def _check_heads(config: dict[str, Any], own: Mapping[str, Any], prefix: str, path: Path) -> None:
    """Resolve head_dim; raise `SourceError` for values wider than keys and partly rotated heads."""
    rotated = own.get("rope.dimension_count")
    width = config.get("head_dim") or rotated or config["hidden_size"] // config["num_attention_heads"]
    config["head_dim"] = width
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    values = own.get("attention.value_length", width)
    if values != width:
        raise _refused(path, f"{prefix}.attention.value_length = {values} beside keys of {width}")
    if rotated not in (None, width):
        if config["model_type"] != "phi3":
            raise _refused(path, f"{prefix}.rope.dimension_count = {rotated} of heads of {width}")
        config["partial_rotary_factor"] = rotated / width


def _attention_scale(config: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Return Gemma's scale of attention scores, which the metadata lack: llama.cpp tells it by the depth."""
    if not architecture.large_layers:
        return {}
    large = config["num_hidden_layers"] == architecture.large_layers
    scale = config["hidden_size"] // config["num_attention_heads"] if large else config["head_dim"]
    return {"query_pre_attn_scalar": scale}


def _rope(
    header: GgufHeader, config: Mapping[str, Any], own: Mapping[str, Any], path: Path
) -> dict[str, Any]:
    """Return the scaling of rotary positions: linear, YaRN, or factors of frequencies that the file holds."""
    factors = {name: _factors(header, name) for name in _ROPE_FACTORS if name in header.tensors}
    kind, factor = own.get("rope.scaling.type", "none"), own.get("rope.scaling.factor", 0.0)
    original = own.get("rope.scaling.original_context_length")
    if "rope_freqs.weight" in factors:
        both = factors["rope_freqs.weight"]
        return {
            "rope_scaling": {
                **{"rope_type": "longrope", "short_factor": both, "long_factor": both, "factor": 1.0},
                **{
                    "attention_factor": 1.0,
                    "original_max_position_embeddings": config["max_position_embeddings"],
                },
            }
        }
    if len(factors) == 2:
        long, short = (factors[name] for name in _ROPE_FACTORS[1:])
        scaling: dict[str, Any] = {
            "rope_type": "longrope",
            "type": "longrope",
            "short_factor": short,
            "long_factor": long,
        }
        if "rope.scaling.attn_factor" in own:
            scaling["attention_factor"] = own["rope.scaling.attn_factor"]
        return {"rope_scaling": scaling}
    if kind == "linear" and factor:
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind == "yarn" and factor and original and "rope.scaling.attn_factor" not in own:
        return {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original,
            }
        }
    if kind != "none" or factors:
        raise _refused(path, f"positions scaled by {kind!r} (factor {factor}, original length {original})")
    return {}


def _factors(header: GgufHeader, name: str) -> list[float]:
    found = header.tensors[name]
    reader = GgufReader({name: StoredTensor(found, found.shape)})
    return [float(value) for value in reader.read(name)]


def stored_tensors(header: GgufHeader, config: Mapping[str, Any], path: Path) -> dict[str, StoredTensor]:
    """Return the tensors by transformers' names; raise `SourceError` for one that no name is known for."""
    _, architecture = architecture_of(header, path)
    found: dict[str, StoredTensor] = {}
    for name, tensor in header.tensors.items():
        if name in _ROPE_FACTORS:
            continue
        renamed, stem = _renamed(name, architecture)
        if not renamed:
            raise _refused(path, f"tensor {name!r} of {header.metadata['general.architecture']}")
        stored = StoredTensor(tensor, tensor.shape)
        if architecture.norms_plus_one and stem.endswith("norm"):
            stored = StoredTensor(tensor, tensor.shape, subtracted=1.0)
        if architecture.permuted and stem in ("attn_q", "attn_k"):
            heads = config["num_attention_heads" if stem == "attn_q" else "num_key_value_heads"]
            stored = _unpermuted(tensor, heads, name, path)
        if stem == "ffn_gate_inp_shexp":
            stored = StoredTensor(tensor, (1, *tensor.shape))
        found |= expert_slices(renamed, stored) if "{}" in renamed else {renamed: stored}
    return found


def _renamed(name: str, architecture: Architecture) -> tuple[str, str]:
    """Return transformers' name of a tensor, empty for an unknown one, and its name in a block."""
    if match := _BLOCK.fullmatch(name):
        layer, stem, ending = match.groups()
        inner = architecture.tensors.get(stem)
        return (f"model.layers.{layer}.{inner}{ending}" if inner else ""), stem
    if match := _TOP_NAME.fullmatch(name):
        stem, ending = match.groups()
        return (_TOP[stem] + ending if stem in _TOP else ""), stem
    return "", ""


def _unpermuted(tensor: GgufTensor, heads: int, name: str, path: Path) -> StoredTensor:
    rows = tensor.shape[0]
    if heads < 1 or rows % (2 * heads):
        raise SourceError(
            f"{name!r} has {rows} rows for {heads} heads, expected a multiple of {2 * heads}", where=str(path)
        )
    return StoredTensor(tensor, tensor.shape, order=rotary_order(rows, heads))
