"""Architectures of GGUF files: transformers' settings from the metadata, and names of tensors.

Conventions of llama.cpp's converter: rows of q and k of some architectures are permuted for its rotary embedding, and
norms of Gemma hold 1 + weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Metadata key after the architecture's name → setting of transformers.
_COMMON = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
_RMS = _COMMON | {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_EXPERTS = {
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_count": "num_experts",
}
_SOFTCAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window",
}
# Name in a block without `.weight` and `.bias` → name in a layer of transformers.
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA = _ATTENTION | _GATED | {"ffn_norm": "post_attention_layernorm"}
_GEMMA2 = _LLAMA | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_QWEN_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_SHARED_EXPERT = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_MIXTRAL_EXPERTS = {
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "ffn_gate_inp": "block_sparse_moe.gate",
}


@dataclass(frozen=True)
class Architecture:
    """Layout of a model in the file: settings by metadata key, fixed settings, names of the tensors of a block."""

    model_type: str
    class_name: str
    keys: Mapping[str, str]
    tensors: Mapping[str, str]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    permuted: bool = False  # rows of q and k, for llama.cpp's rotary embedding
    norms_plus_one: bool = False
    large_layers: int = 0  # depth at which Gemma scales by hidden_size / heads instead of head_dim


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", _RMS, _LLAMA, permuted=True),
    "llama+experts": Architecture(
        "mixtral",
        "MixtralForCausalLM",
        _RMS | {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        _LLAMA | _MIXTRAL_EXPERTS,
        permuted=True,
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _RMS, _LLAMA),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _RMS, _LLAMA),
    "qwen2moe": Architecture(
        "qwen2_moe", "Qwen2MoeForCausalLM", _RMS | _EXPERTS, _LLAMA | _QWEN_EXPERTS | _SHARED_EXPERT
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _RMS | _EXPERTS,
        _LLAMA | _QWEN_EXPERTS,
        {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        _RMS
        | {
            "attention.sliding_window": "sliding_window",
            "rope.scaling.original_context_length": "original_max_position_embeddings",
        },
        _LLAMA | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
    "gemma": Architecture("gemma", "GemmaForCausalLM", _RMS, _LLAMA, norms_plus_one=True),
    "gemma2": Architecture(
        "gemma2", "Gemma2ForCausalLM", _RMS | _SOFTCAPS, _GEMMA2, norms_plus_one=True, large_layers=46
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _RMS | _SOFTCAPS | {"rope.freq_base_swa": "rope_local_base_freq"},
        _GEMMA2,
        norms_plus_one=True,
        large_layers=62,
    ),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", _RMS, _LLAMA, permuted=True),
    "olmo2": Architecture(
        "olmo2",
        "Olmo2ForCausalLM",
        _RMS,
        {k: v for k, v in _LLAMA.items() if not k.endswith("_norm")}
        | {
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
    "granite": Architecture(
        "granite",
        "GraniteForCausalLM",
        _RMS
        | {
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        _LLAMA,
        permuted=True,
    ),
    "starcoder2": Architecture(
        "starcoder2",
        "Starcoder2ForCausalLM",
        _COMMON | {"attention.layer_norm_epsilon": "norm_epsilon"},
        _LLAMA | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        {"sliding_window": None},
    ),
}
