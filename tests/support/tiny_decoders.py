"""Tiny random decoders of every architecture that the tests run, by the name of their configuration."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCABULARY = 320
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**COMMON, "num_key_value_heads": 2}
WIDE = {**GROUPED, "head_dim": 32}  # heads wider than hidden_size / heads
LOCAL = {"sliding_window": 8}
TOKENS: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
GPT: dict[str, Any] = {**TOKENS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
SIZES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen2": {**GROUPED, **LOCAL, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": WIDE,  # norms of queries and keys
    "mistral": {**GROUPED, **LOCAL},
    "gemma": WIDE,
    "gemma2": {**WIDE, **LOCAL, "query_pre_attn_scalar": 16},  # soft caps on logits and attention
    "gemma3_text": {**WIDE, **LOCAL},
    "phi": COMMON,  # a rotated part of each head, biases
    "phi3": GROUPED,
    "gpt2": GPT,
    "gpt_neox": COMMON,
    "starcoder2": GROUPED,
    "olmo2": GROUPED,
    "opt": {
        **COMMON,
        "ffn_dim": 96,
        "word_embed_proj_dim": 64,
    },
    "gpt_oss": {
        **WIDE,
        **LOCAL,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_scaling": None,
    },  # sinks
    "mixtral": {**GROUPED, "num_local_experts": 4},
    "llama4_text": {  # attention in chunks
        **{**GROUPED, "head_dim": 16, "attention_chunk_size": 8, "moe_layers": []},
        **{"layer_types": ["chunked_attention", "full_attention"], "intermediate_size_mlp": 96},
    },
    "deepseek_v3": {  # latent attention: keys wider than values
        **{**COMMON, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16},
        **{"qk_nope_head_dim": 32, "v_head_dim": 24, "head_dim": 16, "first_k_dense_replace": 2},
        **{"n_routed_experts": 4, "moe_intermediate_size": 32},
    },
    "gemma4_text": {  # layers of other shapes
        **{**GROUPED, **LOCAL, "head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 8},
        **{"vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 0},
        "layer_types": ["sliding_attention", "full_attention"],
    },
    # Attention in the model's own code.
    "bloom": {**TOKENS, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    "codegen": {**GPT, "rotary_dim": 8},
    "doge": GROUPED,  # a number for each key added to its logits
    "falcon": {**COMMON, "multi_query": True, "alibi": False},
    "falcon (new decoder)": {**COMMON, "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon (alibi)": {**COMMON, "multi_query": False, "alibi": True, "parallel_attn": False, "bias": True},
    "gpt_neo": {
        **{**TOKENS, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 256},
        **{"attention_types": [[["global", "local"], 1]], "window_size": 8},
    },
    "gpt_neox_japanese": COMMON,
    "gptj": {**GPT, "rotary_dim": 8},
    "mpt": {**TOKENS, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 256},
    "xglm": {
        **{**TOKENS, "d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4},
        "max_position_embeddings": 256,
    },
}


def build(name: str, *, sizes: dict[str, Any] | None = None, **changes: Any) -> nn.Module:
    """Make the same weights at every call, large enough that logits differ; attention as plain as transformers has it.

    `name` may end in a remark in brackets. `sizes`: the configuration of an architecture that SIZES does not have.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        name.partition(" ")[0], **{**(SIZES[name] if sizes is None else sizes), **changes}
    )
    torch.manual_seed(0)
    plain = "sdpa" if name.partition(" ")[0] == "falcon" else "eager"  # which adds Falcon's ALiBi twice
    model = AutoModelForCausalLM.from_config(config, attn_implementation=plain, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.08)
    return model
