"""Tiny random language models with stateful layers, of every such architecture that transformers has.

Attention comes first wherever the configuration allows it.
"""

from __future__ import annotations

from typing import Any

from tests.support.tiny_decoders import COMMON, GROUPED, WIDE

SSM: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
LATENT: dict[str, Any] = {
    **COMMON,
    **{"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "num_experts_per_tok": 2},
    **{"num_local_experts": 4, "moe_intermediate_size": 32},
}


def _types(*names: str) -> dict[str, Any]:
    return {"layer_types": list(names), "num_hidden_layers": len(names)}


# Architectures whose state layers run over a state cache.
STATEFUL: dict[str, dict[str, Any]] = {
    "lfm2": {**GROUPED, **_types("full_attention", "conv")},
    "lfm2_moe": {**GROUPED, **EXPERTS, "num_dense_layers": 1, **_types("full_attention", "conv")},
    "lfm3": {**WIDE, **_types("full_attention", "conv")},
    "qwen3_next": {**WIDE, **DELTA, **EXPERTS, **_types("full_attention", "linear_attention")},
    "qwen3_5_text": {**WIDE, **DELTA, **_types("full_attention", "linear_attention")},
    "qwen3_5_moe_text": {**WIDE, **DELTA, **EXPERTS, **_types("full_attention", "linear_attention")},
    "olmo_hybrid": {**WIDE, **DELTA, **_types("full_attention", "linear_attention")},
    "falcon_h1": {**GROUPED, **SSM, "mamba_d_ssm": 128},
    "bamba": {**GROUPED, **SSM, "attn_layer_indices": [0]},
    "granitemoehybrid": {**GROUPED, **SSM, "num_local_experts": 4, **_types("attention", "mamba")},
    "jamba": {
        **{**GROUPED, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 0},
        **{"mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    },
    "zamba2": {
        **{**COMMON, "num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1},
        **{"mamba_d_state": 8, "n_mamba_heads": 2, "mamba_headdim": 64, "mamba_ngroups": 1, "chunk_size": 8},
    },
    "nemotron_h": {
        **{**WIDE, "layers_block_type": ["attention", "mamba"], "mamba_num_heads": 4, "n_groups": 1},
        **{"mamba_head_dim": 16, "ssm_state_size": 8, "chunk_size": 8},
    },
    "recurrent_gemma": {
        **{**WIDE, "num_hidden_layers": 2, "block_types": ["attention", "recurrent"]},
        **{"attention_window_size": 8, "lru_width": 64},
    },
    "mamba": {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2},
    "mamba2": {
        **{"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16},
        **{"state_size": 16, "n_groups": 1, "chunk_size": 8},
    },
    "falcon_mamba": {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2},
}

# Those that are refused: the configuration, and the layer by which the model is refused.
HYBRIDS: dict[str, tuple[dict[str, Any], str]] = {
    "zamba": (
        {
            **{**GROUPED, "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2},
            **{"mamba_d_state": 8, "mamba_dt_rank": 4, "n_mamba_heads": 2, "use_mamba_kernels": False},
        },
        "model.layers.0.mamba (ZambaMambaMixer)",
    ),
    "minimax": (
        {**WIDE, "num_local_experts": 2, "block_size": 8, **_types("full_attention", "linear_attention")},
        "model.layers.1.self_attn (MiniMaxLightningAttention)",
    ),
    "kimi_linear": (
        {
            **{**LATENT, "linear_head_dim": 16, "linear_num_heads": 4},
            **_types("full_attention", "linear_attention"),
        },
        "model.layers.1.self_attn (KimiLinearDeltaAttention)",
    ),
    "bailing_hybrid": (
        {**LATENT, "head_dim": 16, **_types("full_attention", "linear_attention")},
        "model.layers.1.self_attn",
    ),
    "zaya": (
        {**WIDE, "num_experts": 2, "moe_intermediate_size": 32, "router_hidden_size": 16},
        "model.layers.0.self_attn.qkv_proj.conv_qk_grouped (Conv1d)",
    ),
    "rwkv": (
        {
            **{"vocab_size": 320, "hidden_size": 64, "attention_hidden_size": 64, "num_hidden_layers": 2},
            "context_length": 64,
        },
        "rwkv.blocks.0.attention.time_shift (ZeroPad2d)",
    ),
    "xlstm": (
        {"vocab_size": 320, "hidden_size": 64, "num_heads": 4, "num_hidden_layers": 2},
        "backbone.blocks.0.mlstm_layer.mlstm_backend (xLSTMBackend)",
    ),
}  # fmt: skip
