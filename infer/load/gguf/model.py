"""Settings and tensors of the model in a GGUF file, as transformers has them.

Every setting under the architecture's name is used, or known to change nothing; others are refused, since a setting
left out silently gives wrong numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ... import families
from ...errors import SourceError
from .header import GgufHeader, GgufTensor
from .reader import RenamedTensor, expert_slices, rotary_order, tensor_values
from .rope_settings import FOLDER_HINT, ROPE_FACTORS, refused, rope_settings

# Handled apart from the architecture's own keys, or without effect on the values.
_OTHER_KEYS = frozenset(
    {
        *("vocab_size", "tensor_data_layout", "attention.value_length", "attention.causal", "pooling_type"),
        *("rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.finetuned"),
        *("rope.scaling.attn_factor", "rope.scaling.original_context_length", "rope.scale_linear"),
    }
)
_BLOCK = re.compile(r"blk\.(\d+)\.([a-z0-9_]+(?:\.[a-z_]+)?)(\.weight|\.bias)")
_TOP_NAME = re.compile(r"([a-z0-9_]+)(\.weight|\.bias)")


def architecture_of(header: GgufHeader, path: Path) -> tuple[str, families.GgufLayout]:
    """Return the prefix of the architecture's keys and how it is stored; raise `SourceError` for an unknown one."""
    kind, prefix = header.metadata.get("general.type", "model"), header.metadata.get("general.architecture")
    if kind != "model":
        raise SourceError(f"expected a model, got a GGUF file of type {kind!r}", where=str(path))
    experts = bool(header.metadata.get(f"{prefix}.expert_count"))
    layouts = families.known().gguf
    found = layouts.get(f"{prefix}+experts" if experts and prefix == "llama" else str(prefix))
    if found is None:
        known = ", ".join(sorted(name for name in layouts if "+" not in name))
        raise SourceError(
            f"a GGUF file of architecture {prefix!r}, which infer does not know; known: {known}",
            where=str(path),
            hint=FOLDER_HINT,
        )
    return str(prefix), found


def model_settings(
    header: GgufHeader, prefix: str, layout: families.GgufLayout, path: Path
) -> dict[str, Any]:
    """Return config.json of the model; raise `SourceError` for a setting that infer does not know."""
    own = {
        key.removeprefix(f"{prefix}."): value
        for key, value in header.metadata.items()
        if key.startswith(f"{prefix}.")
    }
    unknown = [
        key
        for key in own
        if key not in {*layout.keys, *layout.unused, *_OTHER_KEYS} and not _is_off(own[key])
    ]
    if unknown:
        raise refused(path, f"the setting {prefix}.{unknown[0]} = {str(own[unknown[0]])[:80]}")
    if own.get("attention.causal", True) is not True or own.get("pooling_type"):
        raise refused(path, "an embedding model (pooling_type, or attention that is not causal)")
    config: dict[str, Any] = {
        "model_type": layout.model_type,
        "architectures": [layout.class_name],
        "vocab_size": _tensor(header, "token_embd.weight", path).shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **{name: tensor in header.tensors for name, tensor in layout.present.items()},
        **layout.fixed,
    }
    if layout.convolutions:
        own["attention.head_count_kv"], config["layer_types"] = _attention_layers(own, prefix, path)
    for key, name in layout.keys.items():
        if key in own and name == "layer_types":
            config[name] = _layer_types(own[key], f"{prefix}.{key}", path)
        elif key in own and not _is_off(own[key]):
            config[name] = _one_value(own[key], f"{prefix}.{key}", path)
    for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "max_position_embeddings"):
        if not isinstance(config.get(name), int):
            raise SourceError(f"the metadata lack {_key_of(layout, prefix, name)}", where=str(path))
    if "layer_types" in layout.keys.values() and "sliding_window" not in config:
        config |= {"sliding_window": None, "layer_types": ["full_attention"] * config["num_hidden_layers"]}
    _check_heads(config, own, layout, f"{prefix}.", path)
    factors = {name: tensor_values(header.tensors[name]) for name in ROPE_FACTORS if name in header.tensors}
    config |= rope_settings(factors, config, own, path)
    return config if layout.computed is None else config | layout.computed(config)


def _is_off(value: Any) -> bool:
    return isinstance(value, bool | int | float | str) and value in (0, False, "", "none")


def _key_of(layout: families.GgufLayout, prefix: str, setting: str) -> str:
    return f"{prefix}." + next(key for key, name in layout.keys.items() if name == setting)


def _one_value(value: Any, key: str, path: Path) -> Any:
    """Return a setting that is equal in all layers; arrays hold one for each."""
    if not isinstance(value, np.ndarray):
        return value
    if value.size == 0 or (value != value.flat[0]).any():
        raise refused(path, f"the setting {key}, which differs between layers")
    return value.flat[0].item()


def _tensor(header: GgufHeader, name: str, path: Path) -> GgufTensor:
    if name not in header.tensors:
        raise SourceError(f"the file lacks the tensor {name!r}", where=str(path))
    return header.tensors[name]


def _layer_types(windows: Any, key: str, path: Path) -> list[str]:
    """Return the kinds of attention of an array that is true for layers with a window."""
    if not isinstance(windows, np.ndarray) or windows.dtype != np.bool_:
        raise refused(path, f"the setting {key}, which is not one boolean for each layer")
    return ["sliding_attention" if one else "full_attention" for one in windows]


def _attention_layers(own: Mapping[str, Any], prefix: str, path: Path) -> tuple[int, list[str]]:
    """Return the number of key-value heads, and the kinds of layers: those without such heads are convolutions."""
    heads = own.get("attention.head_count_kv")
    if not isinstance(heads, np.ndarray) or heads.dtype.kind not in "iu" or not heads.any():
        raise refused(
            path, f"the setting {prefix}.attention.head_count_kv, which is not one number for each layer"
        )
    return int(heads.max()), ["full_attention" if one else "conv" for one in heads]


def _check_heads(
    config: dict[str, Any], own: Mapping[str, Any], layout: families.GgufLayout, prefix: str, path: Path
) -> None:
    """Resolve head_dim; raise `SourceError` for values wider than keys and partly rotated heads."""
    rotated = own.get("rope.dimension_count")
    width = config.get("head_dim") or (0 if layout.rotates_part else rotated)
    width = width or config["hidden_size"] // config["num_attention_heads"]
    config["head_dim"] = width
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    values = own.get("attention.value_length", width)
    if values != width:
        raise refused(path, f"{prefix}attention.value_length = {values} beside keys of {width}")
    if rotated not in (None, width):
        if not layout.rotates_part:
            raise refused(path, f"{prefix}rope.dimension_count = {rotated} of heads of {width}")
        config["partial_rotary_factor"] = rotated / width


def stored_tensors(
    header: GgufHeader, layout: families.GgufLayout, config: Mapping[str, Any], path: Path
) -> dict[str, RenamedTensor]:
    """Return the tensors by transformers' names; raise `SourceError` for one that no name is known for."""
    found: dict[str, RenamedTensor] = {}
    stacked: dict[tuple[str, str, str], GgufTensor] = {}
    stems = {stem for parts in layout.stacks.values() for stem in parts}
    for name, tensor in header.tensors.items():
        if name in ROPE_FACTORS:
            continue
        if (match := _BLOCK.fullmatch(name)) is not None and match[2] in stems:
            stacked[match[1], match[2], match[3]] = tensor
            continue
        renamed, stem = _renamed(name, layout)
        if not renamed:
            raise refused(path, f"tensor {name!r} of {header.metadata['general.architecture']}")
        _check_vector(name, tensor, tensor.shape, path)
        stored = RenamedTensor((tensor,), tensor.shape)
        if layout.norms_plus_one and stem.endswith("norm") and name.endswith(".weight"):
            stored = replace(stored, subtracted=1.0)
        if layout.permuted and stem in ("attn_q", "attn_k"):
            heads = config["num_attention_heads" if stem == "attn_q" else "num_key_value_heads"]
            stored = replace(stored, order=_unpermuted(tensor, heads, name, path))
        if (axis := layout.unit_axes.get(stem)) is not None:
            stored = replace(stored, shape=(*tensor.shape[:axis], 1, *tensor.shape[axis:]))
        if stem in layout.without_ending:
            renamed = renamed.removesuffix(".weight")
        found |= expert_slices(renamed, stored) if "{}" in renamed else {renamed: stored}
    return found | _stacked_experts(stacked, layout.stacks, path)


def _check_vector(name: str, tensor: GgufTensor, shape: tuple[int, ...], path: Path) -> None:
    """Raise `SourceError` for a vector of blocks, whose elements have no place of their own."""
    if len(shape) == 1 and tensor.type.holds_codes:
        raise refused(path, f"tensor {name!r}, a vector of {tensor.type.name}")


def _stacked_experts(
    found: Mapping[tuple[str, str, str], GgufTensor], stacks: Mapping[str, tuple[str, ...]], path: Path
) -> dict[str, RenamedTensor]:
    """Return experts by columns by transformers' names, of tensors by (layer, name in the block, ".weight" or ".bias").

    Raises `SourceError` where a tensor is absent, or of another shape or type than those that it is joined with.
    """
    joined: dict[str, RenamedTensor] = {}
    for layer, stem, ending in found:
        name, stems = next((name, stems) for name, stems in stacks.items() if stem in stems)
        parts = [found.get((layer, one, ending)) for one in stems]
        if None in parts:
            lacks = f"blk.{layer}.{stems[parts.index(None)]}{ending}"
            raise SourceError(f"the file lacks the tensor {lacks!r}", where=str(path))
        held = tuple(part for part in parts if part is not None)
        dims = 2 + (ending == ".weight")
        if len({(one.shape, one.type.name) for one in held}) > 1 or len(held[0].shape) != dims:
            raise SourceError(
                f"the tensors of the experts of layer {layer} differ in shape or type", where=str(path)
            )
        experts, rows, *columns = held[0].shape
        _check_vector(f"blk.{layer}.{stem}{ending}", held[0], (rows, *columns), path)
        own = f"model.layers.{layer}.{name}{'_bias' if ending == '.bias' else ''}"
        joined[own] = RenamedTensor(held, (experts, *columns, rows * len(held)), by_columns=True)
    return joined


def _renamed(name: str, layout: families.GgufLayout) -> tuple[str, str]:
    """Return transformers' name of a tensor, empty for an unknown one, and its name in a block."""
    if match := _BLOCK.fullmatch(name):
        layer, stem, ending = match.groups()
        inner = layout.tensors.get(stem)
        return (f"model.layers.{layer}.{inner}{ending}" if inner else ""), stem
    if match := _TOP_NAME.fullmatch(name):
        stem, ending = match.groups()
        return (layout.top[stem] + ending if stem in layout.top else ""), stem
    return "", ""


def _unpermuted(tensor: GgufTensor, heads: int, name: str, path: Path) -> Tensor:
    """Return where the rows of a projection of queries or keys lie, int64 [rows]."""
    rows = tensor.shape[0]
    if heads < 1 or rows % (2 * heads):
        raise SourceError(
            f"{name!r} has {rows} rows for {heads} heads, expected a multiple of {2 * heads}", where=str(path)
        )
    return rotary_order(rows, heads)
