"""Metadata of a GGUF file from a transformers configuration: the inverse of `load.gguf.model`.

What is written is read back by infer's own reader, and a setting that comes back otherwise refuses the export: some
are known from the architecture alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .. import families
from ..errors import NotUsableError
from ..weights import Checkpoint

# Settings without effect on the values, or about the file rather than the model.
_IGNORED = frozenset(
    """
    _name_or_path architectures attention_bias attention_dropout attn_implementation bos_token_id cache_implementation
    dtype eos_token_id head_dim initializer_range layer_types max_window_layers mlp_bias model_type
    original_max_position_embeddings output_router_logits pad_token_id partial_rotary_factor pretraining_tp
    quantization_config resid_pdrop embd_pdrop residual_dropout embedding_dropout router_aux_loss_coef
    router_jitter_noise tie_word_embeddings tokenizer_class torch_dtype transformers_version unk_token_id use_cache
    vocab_size rope_parameters rope_scaling rope_theta hidden_activation
    """.split()  # noqa: SIM905 - a word is a setting
)
HINT = "Use --to hf, which keeps every setting"


def architecture_for(model_type: str) -> tuple[str, families.GgufLayout]:
    """Return the name in the file and the layout for a model type; raise `NotUsableError` where none is known."""
    layouts = families.known().gguf
    found = next(
        ((name, one) for name, one in layouts.items() if model_type in (one.model_type, *one.alike)), None
    )
    if found is None:
        known = {
            one for held in layouts.values() if not held.stacks for one in (held.model_type, *held.alike)
        }
        raise NotUsableError(
            f"no GGUF architecture for a model of type {model_type!r}; known: {', '.join(sorted(known))}",
            hint=HINT,
        )
    if found[1].stacks:
        raise NotUsableError(f"experts by columns, of {model_type!r}, are not written to GGUF", hint=HINT)
    return found[0].partition("+")[0], found[1]


def model_metadata(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return general keys and those of the architecture; `config` is the configuration of transformers as a dict."""
    prefix, layout = architecture_for(str(config["model_type"]))
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    own: dict[str, Any] = {"vocab_size": config["vocab_size"]}
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    values = {"rope_theta": rope.get("rope_theta", 10000.0), "head_dim": width, **config}
    values.setdefault(
        "num_experts", config.get("num_local_experts")
    )  # transformers' older name of one setting
    values["rope_theta"] = rope.get("rope_theta", values["rope_theta"])
    for key, setting in layout.keys.items():
        value = values.get(setting)
        if isinstance(value, bool | int | float) and value is not None:
            own[key] = value
    own |= {"attention.key_length": width, "attention.value_length": width}
    part = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    own["rope.dimension_count"] = int(width * part)
    own["rope.freq_base"] = float(own["rope.freq_base"])
    kinds = config.get("layer_types") or []
    if layout.convolutions:
        own["attention.head_count_kv"] = [
            own["attention.head_count_kv"] if kind == "full_attention" else 0 for kind in kinds
        ]
    if "attention.sliding_window_pattern" in layout.keys and "sliding_attention" in kinds:
        own["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in kinds]
    own |= _scaling(rope or {}, config)
    return {
        **{"general.architecture": prefix, "general.name": name, "general.alignment": 32},
        **{f"{prefix}.{key}": value for key, value in own.items()},
    }


def resolved(config: Mapping[str, Any], weights: Checkpoint) -> dict[str, Any]:
    """Return the configuration with the settings that the weights alone tell."""
    measured = architecture_for(str(config["model_type"]))[1].measured
    return {**config, **({} if measured is None else measured(config, lambda name: weights[name].shape))}


def _scaling(rope: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    scaling = config.get("rope_scaling") or rope
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in ("default", "llama3", None):
        return {}
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling["factor"])}
    if kind == "yarn" and scaling.get("attention_factor") is None:
        original = scaling.get("original_max_position_embeddings") or config["max_position_embeddings"]
        return {
            **{"rope.scaling.type": "yarn", "rope.scaling.factor": float(scaling["factor"])},
            "rope.scaling.original_context_length": int(original),
        }
    raise NotUsableError(f"positions scaled by {kind!r} are not written to GGUF", hint=HINT)


def llama3_factors(config: Mapping[str, Any]) -> list[float] | None:
    """Return the divisors of the frequencies of Llama 3's scaled positions; None where they are not scaled so."""
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or rope
    if scaling.get("rope_type", scaling.get("type")) != "llama3":
        return None
    theta = rope.get("rope_theta") or config.get("rope_theta", 10000.0)
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    found = []
    for i in range(0, width, 2):
        length = 2 * math.pi * theta ** (i / width)
        smooth = (original / length - low) / (high - low)
        if length < original / high:
            found.append(1.0)
        elif length > original / low:
            found.append(float(factor))
        else:
            found.append(1 / ((1 - smooth) / factor + smooth))
    return found


def check_settings(config: Mapping[str, Any], again: Mapping[str, Any]) -> None:
    """Raise `NotUsableError` for a setting that readers of GGUF files would interpret differently."""
    for name, value in config.items():
        if name in _IGNORED or name not in again or _same(value, again[name]):
            continue
        raise NotUsableError(
            f"a GGUF file has no place for {name} = {str(value)[:80]}: it would be read as {str(again[name])[:80]}",
            hint=HINT,
        )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, int | float) and isinstance(b, int | float) and not isinstance(a, bool):
        return math.isclose(a, b, rel_tol=1e-6)
    return bool(a == b) or (not a and not b)
