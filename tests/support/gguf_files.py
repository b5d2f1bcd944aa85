"""GGUF files of tiny models, written by the `gguf` package with the names and layout of llama.cpp's converter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor, nn

from infer.load.gguf.block_types import BLOCK_TYPES
from tests.support.random_blocks import moderate_blocks

PERMUTED = ("llama", "smollm3", "granite", "arcee", "internlm2")
PLUS_ONE = ("gemma", "gemma2", "gemma3", "nemotron")
EXPERT_PARTS = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}
_KINDS = gguf.GGMLQuantizationType
CODEBOOKS = {  # tensor types of codebooks and ternary numbers, by the endings of names
    **{"q_proj.weight": _KINDS.IQ2_XXS, "k_proj.weight": _KINDS.IQ1_M, "v_proj.weight": _KINDS.IQ3_S},
    **{"o_proj.weight": _KINDS.IQ2_S, "gate_proj.weight": _KINDS.IQ3_XXS, "up_proj.weight": _KINDS.TQ1_0},
    **{"down_proj.weight": _KINDS.IQ1_S, "norm.weight": _KINDS.F32},
    "": _KINDS.IQ2_XS,
}
LETTERS = [
    chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))
]  # of GPT-2's byte alphabet


def write_gguf(
    path: Path,
    model: nn.Module,
    architecture: str,
    *,
    settings: dict[str, Any] | None = None,
    types: dict[str, gguf.GGMLQuantizationType] | None = None,
    tokenizer: Path | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    vocabulary: bool = True,
) -> dict[str, Tensor]:
    """Write a causal model of transformers; returns the weights that the file holds, by transformers' names.

    `settings`: metadata beside the usual ones, without the architecture's name. `types`: the tensor type of every
    matrix whose name ends in a key; codes are random where the package cannot write it. `tokenizer`: a tokenizer.json
    of byte-level BPE, else a made-up vocabulary.
    `tensors`: more of them, by their names in the file. `vocabulary`: false for a file of token ids only.
    """
    config: Any = model.config
    writer = gguf.GGUFWriter(path, architecture)
    _settings(writer, config, settings or {}, architecture)
    if not vocabulary:
        writer.add_tokenizer_model("no_vocab")
    elif tokenizer is None:
        _vocabulary(writer, config.vocab_size)
    else:
        _vocabulary_of(writer, tokenizer)
    kept: dict[str, Tensor] = {}
    names = gguf.get_tensor_name_map(_enum(architecture), config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for stored, values in _stored(name, tensor, names, architecture, config):
            kind = _type(name, values, types or {})
            data = _encoded(values, kind)
            writer.add_tensor(stored, data, raw_dtype=kind)
            kept.setdefault(name, tensor.clone())
            _keep(kept, name, stored, gguf.quants.dequantize(data, kind), architecture, config)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


def _encoded(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Quantize; types that the package does not write get random codes, their scales as large as the values."""
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        block = BLOCK_TYPES[kind.name]
        raw = moderate_blocks(block, values.size // block.block, float(values.std()) / 64, seed=values.size)
        return raw.numpy().reshape(len(values), -1)


def _enum(architecture: str) -> gguf.MODEL_ARCH:
    return next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)


def _type(name: str, values: np.ndarray, types: dict[str, Any]) -> gguf.GGMLQuantizationType:
    if values.ndim < 2:
        return gguf.GGMLQuantizationType.F32
    return next(
        (kind for ending, kind in types.items() if name.endswith(ending)), gguf.GGMLQuantizationType.F32
    )


def _stored(
    name: str, tensor: Tensor, names: gguf.TensorNameMap, architecture: str, config: Any
) -> list[tuple[str, np.ndarray]]:
    """Return names and values in the file of one tensor of the model."""
    values = tensor.float().numpy()
    if architecture == "gpt-oss" and (".experts." in name or name.endswith(".sinks")):
        return _by_columns(name, values)
    if ".experts." in name:
        layer, part = name.split(".")[2], name.rsplit(".", 1)[1]
        stems = EXPERT_PARTS[part]
        return [
            (f"blk.{layer}.{stem}.weight", np.ascontiguousarray(piece))
            for stem, piece in zip(stems, np.split(values, len(stems), 1), strict=True)
        ]
    stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert stored, name
    if architecture in PERMUTED and (heads := _heads(name, config)):
        shape = (heads, 2, len(values) // heads // 2, *values.shape[1:])
        values = values.reshape(shape).swapaxes(1, 2).reshape(values.shape)
    if architecture in PLUS_ONE and name.endswith("norm.weight"):
        values = values + np.float32(1)
    if stored.endswith("shortconv.conv.weight"):
        values = values[:, 0]
    if name.endswith("shared_expert_gate.weight"):
        values = values[0]
    return [(stored, values)]


def _by_columns(name: str, values: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Return GPT-OSS's experts by rows, gate and up in turn, and the sinks."""
    layer, part = name.split(".")[2], name.rsplit(".", 1)[1]
    if part == "sinks":
        return [(f"blk.{layer}.attn_sinks.weight", values)]
    ending = ".bias" if part.endswith("_bias") else ".weight"
    rows = values if ending == ".bias" else values.swapaxes(1, 2)
    stems = EXPERT_PARTS[part.removesuffix("_bias")]
    return [
        (f"blk.{layer}.{stem}{ending}", np.ascontiguousarray(rows[:, at :: len(stems)]))
        for at, stem in enumerate(stems)
    ]


def _heads(name: str, config: Any) -> int:
    if ".q_proj." in name:
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads) if ".k_proj." in name else 0


def _keep(
    kept: dict[str, Tensor], name: str, stored: str, data: np.ndarray, architecture: str, config: Any
) -> None:
    """Write what the file holds back into transformers' layout."""
    values = torch.from_numpy(data.copy())
    if architecture == "gpt-oss" and ("_exps" in stored or "sinks" in stored):
        _keep_by_columns(kept[name], stored, values)
        return
    if "_exps" in stored:
        half = kept[name].shape[1] // 2
        rows = {"ffn_gate_exps": slice(0, half), "ffn_up_exps": slice(half, None)}
        part = stored.split(".")[2]
        kept[name][:, rows.get(part, slice(None))] = values
        return
    if architecture in PERMUTED and (heads := _heads(name, config)):
        values = values.reshape(heads, -1, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
    if architecture in PLUS_ONE and name.endswith("norm.weight"):
        values = values - 1
    kept[name] = values.reshape(kept[name].shape)


def _keep_by_columns(kept: Tensor, stored: str, values: Tensor) -> None:
    rows = kept.transpose(1, 2) if stored.endswith("exps.weight") else kept
    if "ffn_gate" in stored:
        rows[:, 0::2] = values
    elif "ffn_up" in stored:
        rows[:, 1::2] = values
    else:
        rows.copy_(values)


def _settings(writer: gguf.GGUFWriter, config: Any, more: dict[str, Any], architecture: str) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    heads = config.num_key_value_heads
    if "conv" in (kinds := getattr(config, "layer_types", None) or ()):
        heads = [heads if kind == "full_attention" else 0 for kind in kinds]
    writer.add_head_count_kv(heads)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(width)
    writer.add_value_length(width)
    part = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(width * part))
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for key, value in more.items():
        full = f"{architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, str):
            writer.add_string(full, value)
        elif isinstance(value, list):
            writer.add_array(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        else:
            writer.add_float32(full, value)


def _vocabulary_of(writer: gguf.GGUFWriter, path: Path) -> None:
    content = json.loads(path.read_text())
    model, special = content["model"], {token["content"] for token in content["added_tokens"]}
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in special else normal for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(True)


def _vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    special = ["<|begin|>", "<|eot_id|>"]
    tokens = [*special, *LETTERS, "Ġ", "Ċ", "he", "ll", "Ġhe"]
    tokens += [f"unused{index}" for index in range(size - len(tokens))]
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens[:size])
    writer.add_token_types([control if token in special else normal for token in tokens[:size]])
    writer.add_token_merges(["h e", "l l", "Ġ he"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
