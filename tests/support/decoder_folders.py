"""Folders of tiny models with a tokenizer, as sources of exports: that of pydoc_lm, or SentencePiece's BPE."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.support import tiny_decoders

PYDOC = Path(__file__).resolve().parents[2] / "models/pydoc_lm"

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Type of the model → changes of its sizes: those that GGUF files are written of.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False},
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 32},
    "qwen3_moe": {**_EXPERTS, "norm_topk_prob": True, "intermediate_size": 64},
    "mistral": {"sliding_window": None},
    "mixtral": {},
    "qwen2": {"use_sliding_window": False},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 64},
    "phi3": {},
    "gemma": {},
    "gemma3_text": {"query_pre_attn_scalar": 32},
    "smollm3": {"num_hidden_layers": 4},
    "olmo2": {},
    "granite": {"attention_multiplier": 0.5, "embedding_multiplier": 2.0, "logits_scaling": 4.0},
    "starcoder2": {"sliding_window": None},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"num_hidden_layers": 4, "sliding_window": 8},
    "glm4": {"head_dim": 16},
    "stablelm": {"use_qkv_bias": True},
    "phi": {},
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    "seed_oss": {"head_dim": 16},
    "ernie4_5": {"head_dim": 16},
    "arcee": {},
    "nemotron": {"head_dim": 16},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]},
}


def checkpoint(tmp_path: Path, kind: str, **changes: Any) -> Path:
    """Write a tiny model with the tokenizer of pydoc_lm."""
    rows = json.loads((PYDOC / "config.json").read_text())["vocab_size"]
    sizes = tiny_decoders.SIZES.get(kind, tiny_decoders.GROUPED)
    model = tiny_decoders.build(kind, sizes={**sizes, "vocab_size": rows, **changes})
    model.save_pretrained(tmp_path / "m")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(PYDOC / name, tmp_path / "m" / name)
    return tmp_path / "m"


def sentencepiece(folder: Path, rows: int, prefix: bool) -> None:
    """Replace the tokenizer of a folder by SentencePiece's BPE of few pieces, as transformers converts it."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz'.,"]
    merged = ["he", "▁t", "▁the", "in", "th", "ing", "er", "▁▁"]
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *letters]
    words += [f"<unused{index}>" for index in range(rows - len(words))]
    merges = [
        ("h", "e"),
        ("▁", "t"),
        ("▁t", "he"),
        ("i", "n"),
        ("t", "h"),
        ("in", "g"),
        ("e", "r"),
        ("▁", "▁"),
    ]
    model = models.BPE(
        vocab={word: index for index, word in enumerate(words)},
        merges=merges,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    made = Tokenizer(model)
    first = [normalizers.Prepend("▁")] if prefix else []
    made.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
