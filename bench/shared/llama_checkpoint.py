"""Random Llama-shaped checkpoint, written without being in memory."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch

LLAMA_1B = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
}  # fmt: skip
LLAMA_100M = {
    "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32000,
}  # fmt: skip
LLAMA_135M = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152,
}  # fmt: skip
SHARD = 1 << 30


def make_checkpoint(
    folder: Path, shape: dict[str, int], *, dtype: torch.dtype = torch.float32, positions: int = 2048
) -> int:
    """Write a Hugging Face folder with shards of at most 1 GiB, the embedding tied; return the number of weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from infer.load.weight_loading.meta_model import build_on_meta

    config = LlamaConfig(**shape, max_position_embeddings=positions, tie_word_embeddings=True)
    model, _ = build_on_meta(lambda: LlamaForCausalLM(config), "llama")
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if name != "lm_head.weight"}
    num_weights = sum(p.numel() for p in model.parameters())
    need, free = num_weights * dtype.itemsize * 2.2, shutil.disk_usage(folder.parent).free
    if need > free:
        raise SystemExit(
            f"needs {need / 1e9:.1f} GB of disk, {free / 1e9:.1f} GB are free: give another --folder"
        )
    folder.mkdir()
    config.architectures = ["LlamaForCausalLM"]
    (folder / "config.json").write_text(config.to_json_string())
    write_shards(folder, shapes, dtype)
    return num_weights


def write_shards(folder: Path, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
    from infer.weights.safetensors_writer import write_safetensors

    shards: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]] = [{}]
    size = 0
    for name, shape in shapes.items():
        count = torch.Size(shape).numel() * dtype.itemsize
        if shards[-1] and size + count > SHARD:
            shards.append({})
            size = 0
        shards[-1][name] = (dtype, shape)
        size += count
    where = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(
            folder / file, shard, lambda name: random_weight(name, shapes[name]).to(dtype), {"format": "pt"}
        )
        where |= dict.fromkeys(shard, file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def random_weight(name: str, shape: tuple[int, ...]) -> Any:
    """Return a normal tensor with deviation 0.02, seeded by the name; ones for norms."""
    if len(shape) == 1:
        return torch.ones(shape)
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
    return torch.empty(shape).normal_(0, 0.02, generator=torch.Generator().manual_seed(seed))
