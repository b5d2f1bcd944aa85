"""GGUF files of Llama checkpoints: float16, without a vocabulary (token ids go in and logits come out).

Specification: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Weights are those of the checkpoint, bit by
bit; rows of queries and keys are reordered, because llama.cpp rotates neighbours where transformers rotates halves.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from infer.load.weights.safetensors_reader import SafetensorsReader

ALIGNMENT = 32
F32, F16 = 0, 1  # of enum ggml_type
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 5, 6, 7, 8, 9, 10  # of enum gguf_metadata_value_type
_FIXED = {0: 1, 1: 1, 2: 2, 3: 2, UINT32: 4, INT32: 4, FLOAT32: 4, BOOL: 1, UINT64: 8, 11: 8, 12: 8}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(checkpoint: Path, path: Path) -> None:
    """Write a Hugging Face Llama folder as one file, one tensor in memory at a time.

    Raises `ValueError` for another architecture, scaled rope, biases or a tensor that has no place in the file.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    shards = sorted(checkpoint.glob("*.safetensors"))
    reader = SafetensorsReader(shards)
    metadata = _metadata(config)
    names = {name: _name(name) for name in reader.names()}
    head = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(names), len(metadata)))
    for key, (kind, value) in metadata.items():
        head += _string(key) + struct.pack("<I", kind) + _value(kind, value)
    at = 0
    for name, theirs in names.items():
        shape, type_ = reader.shape(name), F32 if len(reader.shape(name)) == 1 else F16
        head += _string(theirs) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += struct.pack("<IQ", type_, at)
        at += _aligned(torch.Size(shape).numel() * (4 if type_ == F32 else 2))
    with path.open("wb") as file:
        file.write(head)
        _pad(file)
        for name in names:
            file.write(_stored(name, reader.read(name), config).numpy().tobytes())
            _pad(file)


def tensor_bytes(path: Path) -> int:
    """Return the bytes of the weights in a GGUF file: the file without its header."""
    with path.open("rb") as file:
        magic, _, tensors, values = struct.unpack("<4sIQQ", file.read(24))
        if magic != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file")
        for _ in range(values):
            _read_string(file)
            _skip(file, *struct.unpack("<I", file.read(4)))
        for _ in range(tensors):
            _read_string(file)
            file.seek(struct.unpack("<I", file.read(4))[0] * 8 + 12, 1)
        return path.stat().st_size - _aligned(file.tell())


def _metadata(config: dict[str, Any]) -> dict[str, tuple[int, Any]]:
    rope = config.get("rope_parameters") or {}
    plain = config["model_type"] == "llama" and rope.get("rope_type", "default") == "default"
    if not plain or config.get("attention_bias") or config.get("mlp_bias"):
        kind = f"{config['model_type']}, rope {rope.get('rope_type', 'default')}"
        raise ValueError(f"expected a Llama with plain rope and no biases, got {kind}")
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    return {
        "general.architecture": (STRING, "llama"),
        "general.alignment": (UINT32, ALIGNMENT),
        "general.file_type": (UINT32, 1),
        "llama.vocab_size": (UINT32, config["vocab_size"]),
        "llama.context_length": (UINT32, config["max_position_embeddings"]),
        "llama.embedding_length": (UINT32, config["hidden_size"]),
        "llama.block_count": (UINT32, config["num_hidden_layers"]),
        "llama.feed_forward_length": (UINT32, config["intermediate_size"]),
        "llama.rope.dimension_count": (UINT32, width),
        "llama.rope.freq_base": (FLOAT32, rope.get("rope_theta", 10000.0)),
        "llama.attention.head_count": (UINT32, heads),
        "llama.attention.head_count_kv": (UINT32, config["num_key_value_heads"]),
        "llama.attention.key_length": (UINT32, width),
        "llama.attention.value_length": (UINT32, width),
        "llama.attention.layer_norm_rms_epsilon": (FLOAT32, config["rms_norm_eps"]),
        "tokenizer.ggml.model": (STRING, "no_vocab"),
    }


def _name(name: str) -> str:
    """Rename a tensor: `model.layers.3.mlp.up_proj.weight` → `blk.3.ffn_up.weight`."""
    stem, _, kind = name.rpartition(".")
    if kind == "weight" and stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.weight"
    parts = stem.removeprefix("model.layers.").split(".", 1)
    if kind != "weight" or len(parts) != 2 or parts[1] not in _LAYER:
        raise ValueError(f"a Llama has no tensor named {name!r}")
    return f"blk.{parts[0]}.{_LAYER[parts[1]]}.weight"


def _stored(name: str, weight: Tensor, config: dict[str, Any]) -> Tensor:
    if weight.dim() == 1:
        return weight.float()
    for part, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if f".{part}." in name:
            halves = weight.unflatten(0, (config[key], 2, -1))
            weight = halves.transpose(1, 2).reshape(weight.shape)
    return weight.half().contiguous()


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(kind: int, value: Any) -> bytes:
    return _string(value) if kind == STRING else struct.pack({UINT32: "<I", FLOAT32: "<f"}[kind], value)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % ALIGNMENT))


def _read_string(file: BinaryIO) -> bytes:
    return file.read(struct.unpack("<Q", file.read(8))[0])


def _skip(file: BinaryIO, kind: int) -> None:
    if kind == STRING:
        _read_string(file)
    elif kind == ARRAY:
        inner, count = struct.unpack("<IQ", file.read(12))
        for _ in range(count):
            _skip(file, inner)
    else:
        file.seek(_FIXED[kind], 1)
